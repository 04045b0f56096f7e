"""The GPU report: which kernels a GPU has run, and how far their errors were from their budgets.

`python -m tests.gpu` runs the checks and writes it. It keeps the hash of each file of
fla_cp/kernels: one that changed since is unverified on a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "fla_cp" / "kernels"
REPORT = ROOT / "tests" / "gpu" / "report.json"


def kernel_hashes() -> dict[str, str]:
    """Hash of the code of each kernel file, without comments, docstrings and layout.

    It is the same in every version of Python.
    """
    return {
        str(file.relative_to(KERNELS).with_suffix("")): hashlib.sha256(
            said(file.read_text()).encode()
        ).hexdigest()[:16]
        for file in sorted(KERNELS.rglob("*.py"))
        if file.stem != "__init__" and file.parent.name != "torch"
    }


def said(source: str) -> str:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (
            ast.get_docstring(node) is not None
        ):
            text = node.body[0]
            for n in range(text.lineno - 1, text.end_lineno or text.lineno):
                lines[n] = "\n"
    marks = {tokenize.INDENT: "<", tokenize.DEDENT: ">", tokenize.NEWLINE: ";"}
    skipped = (tokenize.COMMENT, tokenize.NL)
    tokens = whole_strings(tokenize.generate_tokens(io.StringIO("".join(lines)).readline), lines)
    words = (marks.get(t.type, t.string) for t in tokens if t.type not in skipped)
    return "".join("".join(words).split())


def whole_strings(
    tokens: Iterable[tokenize.TokenInfo], lines: list[str]
) -> Iterable[tokenize.TokenInfo]:
    """The tokens with each f-string as one, as Python 3.11 has them; 3.12 splits f-strings."""
    starts, ends = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))
    within: list[tokenize.TokenInfo] = []
    for t in tokens:
        if t.type == starts:
            within.append(t)
        if not within:
            yield t
        if t.type == ends:
            (row, column), (end_row, end) = within.pop().start, t.end
            if not within:
                text = lines[row - 1 : end_row]
                text[-1] = text[-1][:end]
                text[0] = text[0][column:]
                yield t._replace(type=tokenize.STRING, string="".join(text))


def warn_if_stale(path: Path, parts: Iterable[str] = ()) -> None:
    """Prints a warning unless the report at `path` is about these kernels, has all `parts`, and all
    checks passed."""
    report = json.loads(path.read_text()) if path.exists() else {"kernels": {}, "failed": 0}
    now = kernel_hashes()
    changed = sorted(n for n, digest in now.items() if report["kernels"].get(n) != digest)
    if changed:
        print(
            f"warning: fla_cp/kernels: {', '.join(changed)} changed since the last GPU run recorded"
            f" in {path.name}: unverified on a GPU. Run `python -m tests.gpu` on one."
        )
    rows, unknown = rows_path(path), set()
    if rows.exists() or "missing" not in report:
        lines = rows.read_text().splitlines() if rows.exists() else []
        unknown = set(parts) - {json.loads(line).get("part") for line in lines}
    else:
        print(f"warning: {rows.name}, the single results of {path.name}, is not there.")
    missing = sorted({*report.get("missing", ()), *unknown})
    if missing:
        print(
            f"warning: {len(missing)} parts are missing in {path.name}: {', '.join(missing)}. "
            "`python -m tests.gpu` on a GPU adds them."
        )
    if report["failed"]:
        print(f"warning: {report['failed']} checks failed in the last GPU run, see {path.name}")


def ratio(row: dict) -> float:
    """The worst error of a check, as a share of its budget; infinite if it failed."""
    return float(row.get("use", 0.0)) if row["ok"] else math.inf


def group_of(row: dict) -> str:
    """The operator or stage of a check: the first word of its case, without a number."""
    return row["case"].split()[0].rstrip("0123456789")


def kept_rows(path: Path) -> dict[str, list[dict]]:
    """The rows of each part that the report at `path` has, if it is about these kernels."""
    found: dict[str, list[dict]] = {}
    if path.exists() and json.loads(path.read_text())["kernels"] == kernel_hashes():
        rows = rows_path(path)
        for line in rows.read_text().splitlines() if rows.exists() else ():
            row = json.loads(line)
            found.setdefault(row.get("part", ""), []).append(row)
    return found


def write_report(
    path: Path,
    facts: dict,
    kernels: dict[str, str],
    parts: dict[str, list[dict]],
    missing: list[str],
) -> dict:
    """Writes the summary to `path` and all rows to a file next to it; returns the summary.

    facts: date, GPU, versions. kernels: `kernel_hashes` when the run began. parts: the rows of each
    part that has run. missing: the other parts.
    The summary has the number of checks that passed and failed and, for each group of checks, their
    number and the largest share of an error budget.
    """
    rows = [row | {"part": part} for part, found in parts.items() for row in found]
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    report = {
        **facts,
        "passed": sum(row["ok"] for row in rows),
        "failed": sum(not row["ok"] for row in rows),
        "missing": missing,
        "rows": rows_path(path).name,
        "worst share of a budget": {
            name: f"{max(map(ratio, found)):.3f} in {len(found)}"
            for name, found in sorted(groups.items())
        },
        "kernels": kernels,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    rows_path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report


def rows_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_rows.jsonl")
