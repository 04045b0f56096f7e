"""The kernels on a GPU against fp64: `python -m tests.gpu [--out tests/gpu/report.json]`.

Every part runs in a process of its own, all at once and on all GPUs, so that one failing kernel
does not hide the others. What is checked is in checks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from tests.gpu import REPORT, ROOT, warn_if_stale, write_report


def sanitize() -> dict:
    """Out-of-bounds accesses and races of one small call, as compute-sanitizer counts them."""
    row: dict = {"K": 64, "V": 64, "dtype": "bfloat16"}
    if shutil.which("compute-sanitizer") is None:
        return row | {"case": SANITIZER, "ok": False, "error": "not installed"}
    row |= {"case": SANITIZER, "ok": True}
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


SANITIZER = "compute-sanitizer"
SMALL_CALL = """
import torch
from fla_cp import kda_gate
from benchmarks.tune import cut_into
from tests.gpu.checks import BF16, INSIDE, SAFE, conv_stage
from tests.support.cases import Case, options
from tests.support.running import run, run_recurrent
from tests.support.members import BY_NAME, Call, collect, draw, operator
for name in ("kda", "gated_delta_rule", "comba", "gla", "simple_gla"):
    member = BY_NAME[name]
    x, keywords, weights = draw(member, Call(T=150, K=24, V=40, inside=True), torch.float32)
    x = {n: t.cuda().to(BF16 if n in member.arguments else t.dtype) for n, t in x.items()}
    with cut_into(1):
        call = lambda y: operator(member, "chunk", y, **keywords, impl="triton")
        collect(call, x, [w.cuda() for w in weights])
for gate in (SAFE, {}):
    for cu in (None, (0, 1, 65, 65, 70, 130)):
        inside = options(**INSIDE, **gate)
        case = Case("s", T=130, H=1, HV=2, K=24, V=40, cu_seqlens=cu, options=inside)
        run(case, BF16, "triton", device="cuda")
for v_first in (False, True):
    case = Case("r", T=9, H=1, HV=2, K=24, V=40, cu_seqlens=(0, 1, 9), options=options(**INSIDE))
    run_recurrent(case, BF16, "triton", device="cuda", v_first=v_first)
for halo in (0, 6):
    shapes = {"x": (733, 300), "halo": (halo, 300), "weight": (300, 4), "bias": (300,)}
    x = {n: torch.randn(*s, dtype=BF16) for n, s in shapes.items()}
    conv_stage(x | {"dy": x["x"]}, "triton")
g = torch.randn(70, 3, 24, device="cuda", requires_grad=True)
kda_gate(g, torch.zeros(3, device="cuda"), impl="triton").sum().backward()
torch.cuda.synchronize()
"""


def part(name: str) -> list[dict]:
    from tests.gpu import checks

    return [sanitize()] if name == SANITIZER else checks.parts()[name]()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--part", help="check this part here and print JSON")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all parts")
    parser.add_argument("--stale", action="store_true", help="only warn if --out is out of date")
    args = parser.parse_args()
    if args.stale:
        warn_if_stale(args.out)
        return 0
    if args.part:
        print("ROWS " + json.dumps(part(args.part)))
        return 0
    import torch
    import triton

    import fla_cp.kernels.triton.backend  # noqa: F401, chooses the assembler that the report names
    from tests.gpu import checks

    started, gpus = time.time(), torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    children = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--part", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": visible[n % gpus]} if gpus > 1 else {}),
        )
        for n, name in enumerate([SANITIZER, *checks.parts()])
    }
    rows = []
    for name, child in children.items():
        try:
            out, _ = child.communicate(timeout=max(1.0, started + args.limit - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
        line = next((x for x in out.splitlines() if x.startswith("ROWS ")), None)
        died = [{"case": f"all of {name}", "ok": False, "error": out[-300:]}]
        rows += json.loads(line[5:]) if line else died
    facts = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": triton.knobs.nvidia.ptxas.version,
        "seconds": round(time.time() - started),
    }
    report = write_report(args.out, facts, rows)
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    print(f"{report['passed']} passed, {report['failed']} failed")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
