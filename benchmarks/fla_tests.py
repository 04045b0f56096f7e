"""FLA's own tests with the operators of `fla_cp.compat` in the place of FLA's.

    python -m benchmarks.fla_tests FOLDER [--device cpu] [--jobs 12] [--out tests.json]

FOLDER is a copy of the `tests` of flash-linear-attention, which its wheels do not have; FLA itself
must be importable. Before a test file is imported, the functions that `fla_cp.compat` offers are
replaced where FLA defines them and in the packages that pass them on. What FLA's other modules,
such as its references, imported before stays FLA's own.

Each test has one of these results:

- right: it passed, and called ours at least once.
- not ours: it passed without a call of ours, so it says nothing about them.
- wrong: an assertion of the test failed.
- lacks: it calls what `fla_cp.compat` does not have or refuses (a name, a keyword or a value), or
  wants an error or a warning of FLA.
- error: it failed in another way, as FLA's own kernels do where there is no GPU.
- stopped: it took more than its time, or the whole run did.
- skipped: it skipped itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = "right", "wrong", "lacks", "error", "stopped", "skipped", "not ours"
PASSED = "right", "skipped", "not ours"
LINES, REASONS = 78, 20
"""The printed table has no more lines than this, so many of them for reasons."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker is not None:
        from benchmarks.fla_tests_worker import run_share

        return run_share(args)
    found = run(args)
    if args.out:
        args.out.write_text(json.dumps({"folder": args.folder.name, "tests": found}, indent=1))
    print("\n".join(table(found)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.fla_tests", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="FLA's tests")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--select", default="", help="what pytest's -k takes")
    parser.add_argument(
        "--conftest",
        action="store_true",
        help="with FLA's fixtures: new tensors are NaN and have guards; needs a GPU",
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds for one test")
    parser.add_argument("--total", type=float, default=180, help="seconds for all of them")
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all tests, from processes that each run every `jobs`-th test."""
    end = time.monotonic() + args.total
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, f"{i}.jsonl") for i in range(args.jobs)]
        children = []
        for i, part in enumerate(parts):
            given = [str(args.folder), "--device", args.device, "--jobs", str(args.jobs)]
            given += ["--limit", str(args.limit), f"--select={args.select}"]
            given += ["--conftest"] * args.conftest
            given += ["--worker", str(i), "--part", str(part)]
            command = [sys.executable, "-m", "benchmarks.fla_tests", *given]
            with open(part.with_suffix(".log"), "w") as log:
                child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                children.append(child)
        for child in children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # and the processes that its tests started
                child.wait()
        found = [result for part in parts for result in read(part)]
        for part in parts:
            if not part.exists():  # nothing was collected: the log says why
                text = part.with_suffix(".log").read_text().strip().splitlines() or ["no output"]
                found.append(failure(f"process {part.stem}", "error", text[-1]))
    return merged(found)


def read(part: Path) -> list[dict[str, Any]]:
    """A process's results. What it collected and did not finish was stopped."""
    if not part.exists():
        return []
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    done = [line for line in lines if "result" in line]
    names = {line["test"] for line in done}
    waiting = [name for line in lines for name in line.get("collected", ()) if name not in names]
    begun = {line["begun"] for line in lines if "begun" in line}
    reasons = ("the process ended in it" if name in begun else "not begun" for name in waiting)
    return done + [failure(n, "stopped", r) for n, r in zip(waiting, reasons, strict=True)]


def merged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted, and once each: every process reports a file that could not be imported."""
    return sorted({result["test"]: result for result in found}.values(), key=lambda r: r["test"])


def failure(test: str, result: str, reason: str) -> dict[str, Any]:
    return {"test": test, "result": result, "reason": reason, "calls": 0, "seconds": 0.0}


def classify(error: BaseException, file: str) -> str:
    """The result of a test that raised `error`, whose last frame is in `file`."""
    ours = f"{os.sep}fla_cp{os.sep}" in file
    if isinstance(error, TimeoutError):
        return "stopped"
    missing = isinstance(error, AttributeError | NotImplementedError)
    if missing and ours:  # our code refuses calls in other ways, so this is a fault of it
        return "error"
    if missing or isinstance(error, ImportError):
        return "lacks"
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return "lacks"
    if isinstance(error, ValueError | TypeError) and ours:
        return "lacks"
    if str(error).startswith(("DID NOT RAISE", "DID NOT WARN", "Regex pattern did not match")):
        return "lacks"
    # pytest.fail raises what is no Exception.
    wrong = isinstance(error, AssertionError) or not isinstance(error, Exception)
    return "wrong" if wrong else "error"


def table(found: list[dict[str, Any]]) -> list[str]:
    """A line for each test function, one for their sum, and the reasons of what is not right.

    Files without a failure have one line if there are many functions, then all files.
    """
    failed = {r["test"].split("::")[0] for r in found if r["result"] not in PASSED}
    for whole in (set(), {r["test"].split("::")[0] for r in found} - failed, None):
        counts: dict[str, Counter[str]] = {}
        for result in found:
            name = result["test"].split("[")[0]
            file = name.split("::")[0]
            name = file if whole is None or file in whole else name
            counts.setdefault(name, Counter())[result["result"]] += 1
        if len(counts) <= LINES - REASONS:
            break
    width = max(map(len, counts), default=4)
    lines = [" ".join([f"{'test':{width}}", *(f"{name:>8}" for name in RESULTS)])]
    total = sum(counts.values(), Counter())
    for name, count in [*counts.items(), ("all", total)]:
        cells = (f"{count[result] or '-':>8}" for result in RESULTS)
        lines.append(" ".join([f"{name:{width}}", *cells]))
    reasons = Counter(
        (r["result"], r["test"].split("[")[0].split("::")[-1], r["reason"][:150])
        for r in found
        if r["result"] not in PASSED
    )
    room = LINES - len(lines)
    lines += [
        f"{n} {result}, {test}: {why}" for (result, test, why), n in reasons.most_common(room)
    ]
    if len(reasons) > room:
        lines.append(f"and {len(reasons) - room} more reasons")
    return lines


if __name__ == "__main__":
    sys.exit(main())
