"""The kernels on a GPU against fp64: `python -m tests.gpu [--out tests/gpu_report.json]`.

Every key size runs in a process of its own, all at once, so that one failing kernel does not
hide the others. The report keeps the hash of fla_cp/kernels: a kernel changed since is unverified.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((16, 16), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))
LENGTHS = (1, 63, 64, 65, 1000, 8192)
INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
SAFE = {"safe_gate": True, "lower_bound": -5.0}


def kernels_hash() -> str:
    """Hash of what the kernels' sources say, comments and docstrings apart."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "fla_cp" / "kernels").glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (
                ast.get_docstring(node) is not None
            ):
                node.body = node.body[1:]
        digest.update(ast.unparse(tree).encode())  # ast.dump differs by version
    return digest.hexdigest()[:16]


def cases(K: int, V: int):
    """(name, Case, dtype) of one size."""
    from tests.cases import Case, options

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    inside, safe = options(**INSIDE), options(**INSIDE, **SAFE)
    shape = {"H": 2, "HV": 2, "K": K, "V": V}
    grouped = {**shape, "HV": 4}
    cu = (0, 1, 65, 65, 700, 1000)
    for T in LENGTHS:
        yield f"safe T={T}", Case("safe", T=T, **shape, options=safe), bf16
        yield f"any T={T}", Case("any", T=T, **shape, options=inside), bf16
        if T <= 1000:
            yield f"any fp32 T={T}", Case("any", T=T, **shape, options=inside), fp32
    yield "safe fp32", Case("safe", T=300, **shape, options=safe), fp32
    yield "safe fp16", Case("safe", T=300, **shape, options=safe), fp16
    yield "grouped packed", Case("p", T=1000, **grouped, cu_seqlens=cu, options=safe), bf16
    yield "grouped packed any", Case("p", T=1000, **grouped, cu_seqlens=cu, options=inside), bf16
    yield "grouped packed fp32", Case("p", T=1000, **grouped, cu_seqlens=cu, options=inside), fp32
    yield "given slow", Case("g", T=1000, **shape, decay=1e-3), bf16
    yield "given strong", Case("g", T=300, **shape, decay=40.0), bf16
    yield "given safe", Case("g", T=300, **shape, decay=5.0, options=options(**SAFE)), bf16
    yield "none", Case("g", T=300, **shape, decay=0.0), bf16
    yield "rows", Case("r", T=130, B=3, **shape, options=safe), bf16
    keep = options(**INSIDE, **SAFE, disable_recompute=True)
    yield "kept", Case("k", T=300, **shape, options=keep), bf16
    more = options(**INSIDE, **SAFE, allow_neg_eigval=True, scale=0.5)
    yield "neg eigval", Case("n", T=300, **shape, options=more), bf16
    yield "exp", Case("e", T=300, **shape, options=options(**INSIDE, use_exp2=False)), bf16


def tiles(K: int, V: int):
    """(name, stage, tile) of every candidate of every stage."""
    from fla_cp.kernels import tuning

    for stage in sorted({stage for _, stage, *_ in tuning.TABLE}):
        for tile in tuning.candidates(stage, K, V):
            yield f"{stage} {tuple(tile)}", stage, tile


def check(K: int, V: int) -> list[dict]:
    """Largest use of the error budget over outputs and gradients, per case."""
    from fla_cp.kernels.measure import forced
    from tests.cases import Case, options

    rows = [one(K, V, name, case, dtype) for name, case, dtype in cases(K, V)]
    if (K, V) in ((64, 64), (128, 128)):
        shape = {"T": 300, "H": 2, "HV": 2, "K": K, "V": V}
        for name, stage, tile in tiles(K, V):
            gate = {} if stage.endswith("_any") else SAFE
            with forced({stage: tile}):
                case = Case("tile", **shape, options=options(**INSIDE, **gate))
                rows.append(one(K, V, name, case, torch.bfloat16))
    return rows


def one(K: int, V: int, name: str, case, dtype: torch.dtype) -> dict:
    from tests.running import run

    row = {"K": K, "V": V, "case": name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        started = time.perf_counter()
        actual = run(case, dtype, "triton", device="cuda")
        row["first_call_s"] = round(time.perf_counter() - started, 2)
        again = run(case, dtype, "triton", device="cuda")
        rounded = {n: t.double() for n, t in case.inputs(dtype=dtype).items()}
        exact = run(case, torch.float64, device="cuda", inputs=rounded)
        plain = run(case, dtype, "torch", device="cuda")
        row["same_bits"] = all(torch.equal(actual[n], again[n]) for n in actual)
        walk = (
            walks(case, rounded, actual["dg"].double() - exact["dg"]) if "dA_log" in exact else {}
        )
        row["use"], row["worst"] = max(
            (use(actual[n], exact[n], plain[n], walk.get(n), dtype), n) for n in actual
        )
        row["ok"] = row["same_bits"] and row["use"] <= 1.0
    except Exception as error:  # reported, and the process goes on or dies with the GPU context
        row.update(ok=False, error=repr(error)[:200])
    return row


def walks(case, x: dict[str, torch.Tensor], error: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the gate's sums over tokens may be off, given the error of dg [B, T, HV, K].

    dA_log and ddt_bias add up weight * dg before dg is rounded: six standard deviations of a sum
    of errors as large as those of dg, equal within a chunk (dg is a sum along it) and independent
    between chunks and channels.
    """
    raw = x["g"].to(error.device)
    if "dt_bias" in x:
        raw = raw + x["dt_bias"].to(error.device).view(raw.shape[-2:])
    if dict(case.options).get("lower_bound") is None:  # weight: (dg / dA_log) / (dg / draw)
        weight = torch.nn.functional.softplus(raw) / raw.sigmoid()
    else:
        weight = raw
    size = error.square().mean((0, 1), keepdim=True).sqrt()

    def walk(w: torch.Tensor) -> torch.Tensor:
        terms = (w.abs() * size).flatten(0, 1)
        terms = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, -len(terms) % 64))
        return terms.unflatten(0, (-1, 64)).sum(1).square().sum(0)

    return {
        "dA_log": 6 * walk(weight).sum(-1).sqrt(),
        "ddt_bias": 6 * walk(torch.ones_like(weight)).sqrt().flatten(),
    }


def use(
    actual: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    walk: torch.Tensor | None,
    dtype: torch.dtype,
) -> float:
    """Share of the error budget: twice the torch stages' error plus six roundings to the inputs'
    dtype, of half a unit each, as rms and as maximum. Six, since that many rounded operands follow
    one another on the longest way to a gradient: kg, T, r, v_new, h (or dh) and the gradient of the
    scores; the torch stages round none. walk: what a sum over all tokens may be off besides."""
    unit = torch.finfo(dtype).eps
    shares = []
    for size in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
        budget = 2 * size(baseline.double() - exact) + 6 * unit / 2 * size(exact)
        if walk is not None:
            budget = budget + size(walk)
        shares.append((size(actual.double() - exact) / budget.clamp(min=1e-30)).item())
    return max(shares)


def sanitize() -> dict:
    """Out-of-bounds accesses and races of one small call, as compute-sanitizer counts them."""
    row: dict = {"K": 64, "V": 64, "dtype": "bfloat16"}
    if shutil.which("compute-sanitizer") is None:
        return row | {"case": "compute-sanitizer", "ok": False, "error": "not installed"}
    row |= {"case": "compute-sanitizer", "ok": True}
    for tool in ("memcheck", "initcheck"):
        result = subprocess.run(
            ["compute-sanitizer", "--tool", tool, sys.executable, "-c", SMALL_CALL],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        summary = re.search(r"ERROR SUMMARY: (\d+) error", result.stdout)
        row[tool] = int(summary[1]) if summary else result.stdout[-200:]
        row["ok"] &= row[tool] == 0
    return row


SMALL_CALL = """
import torch
from tests.cases import Case, options
from tests.gpu import INSIDE, SAFE
from tests.running import run
for gate in (SAFE, {}):
    for cu in (None, (0, 1, 65, 65, 70, 130)):
        inside = options(**INSIDE, **gate)
        case = Case("s", T=130, H=1, HV=2, K=24, V=40, cu_seqlens=cu, options=inside)
        run(case, torch.bfloat16, "triton", device="cuda")
torch.cuda.synchronize()
"""


def warn_if_stale(path: Path) -> None:
    """Prints a warning unless the report at `path` is of these kernels and passed."""
    report = json.loads(path.read_text()) if path.exists() else {"kernels": None, "rows": []}
    failed = sum(not row["ok"] for row in report["rows"])
    if "note" in report:
        print(f"warning: {path.name}: {report['note']}")
    if report["kernels"] != kernels_hash():
        print(
            "warning: fla_cp/kernels changed since the last GPU run recorded in "
            f"{path.name}: unverified on a GPU. Run `python -m tests.gpu` on one."
        )
    elif failed:
        print(f"warning: {failed} checks failed in the last GPU run, see {path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "gpu_report.json")
    parser.add_argument("--size", help="K,V: check this one here and print JSON")
    parser.add_argument("--stale", action="store_true", help="only warn if --out is out of date")
    args = parser.parse_args()
    if args.stale:
        warn_if_stale(args.out)
        return 0
    if args.size:
        print("ROWS " + json.dumps(check(*map(int, args.size.split(",")))))
        return 0
    started = time.time()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--size", f"{K},{V}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for K, V in SIZES
    ]
    rows = []
    for (K, V), child in zip(SIZES, children, strict=True):
        out, _ = child.communicate()
        line = next((x for x in out.splitlines() if x.startswith("ROWS ")), None)
        died = [{"K": K, "V": V, "case": "all", "ok": False, "error": out[-300:]}]
        rows += json.loads(line[5:]) if line else died
    rows.append(sanitize())
    import triton

    report = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": triton.knobs.nvidia.ptxas.version,
        "kernels": kernels_hash(),
        "seconds": round(time.time() - started),
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
