"""The kernels on a GPU against fp64: `python -m tests.gpu [--out tests/gpu/report.json]`.

Every part runs in a process of its own, so that one failing kernel does not hide the others. Parts
that passed on the same kernels in an earlier run are kept, so that several short runs make one
report. The report is written whenever a part ends, so that a run that is stopped loses only the
parts that were running. What is checked is in checks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import IO

from tests.gpu import REPORT, ROOT, kept_rows, kernel_hashes, warn_if_stale, write_report


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
from tests.gpu.cases import BF16, INSIDE, SAFE
from tests.gpu.checks import conv_stage
from tests.support.cases import Case, options
from tests.support.running import run, run_recurrent
from tests.support.members import BY_NAME, Call, collect, draw, operator
for name in ("kda", "gated_delta_rule", "comba", "dplr_delta_rule", "gla", "simple_gla"):
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


def all_ok(rows: list[dict] | None) -> bool:
    return rows is not None and all(row["ok"] for row in rows)


def lacks_memory(row: dict) -> bool:
    """Whether a check failed because the GPU had no memory left."""
    return not row["ok"] and "out of memory" in row.get("error", "").lower()


def run_parts(names: list[str], jobs: int, limit: float) -> Iterator[tuple[str, list[dict]]]:
    """Each part that ends within `limit` seconds, and its rows, when it ends. `jobs` of them run at
    a time, on all GPUs. A part that fails has one row that says so. One that finds no memory beside
    the others runs again at the end, by itself."""
    import torch

    ends, gpus = time.time() + limit, torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    count = 0
    running: dict[str, tuple[subprocess.Popen, IO[str]]] = {}
    waiting, alone, again = list(names), list[str](), set[str]()

    def start(name: str) -> None:
        at = {"CUDA_VISIBLE_DEVICES": visible[names.index(name) % gpus]} if gpus > 1 else {}
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115, read when the part has ended
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--part", name],
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | at,
        )  # fmt: skip
        running[name] = child, out

    while (waiting or running or alone) and time.time() < ends:
        while waiting and len(running) < jobs:
            start(waiting.pop(0))
        if alone and not running:
            again.add(alone[0])
            start(alone.pop(0))
        for name, (child, out) in list(running.items()):
            if child.poll() is None:
                continue
            del running[name]
            out.seek(0)
            said = out.read()
            out.close()
            line = next((x for x in said.splitlines() if x.startswith("ROWS ")), None)
            died = [{"case": f"all of {name}", "ok": False, "error": said[-1000:]}]
            rows = json.loads(line[5:]) if line else died
            if name not in again and any(map(lacks_memory, rows)):
                alone.append(name)
                continue
            count += 1
            failed = [row for row in rows if not row["ok"]]
            print(f"{count} of {len(names)} parts: {name}", *failed, sep="\n  ", flush=True)
            yield name, rows
        time.sleep(0.2)
    for child, _ in running.values():
        child.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--part", help="check this part here and print JSON")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parts at a time")
    parser.add_argument("--again", action="store_true", help="run what --out has, too")
    parser.add_argument("--stale", action="store_true", help="only warn if --out is out of date")
    args = parser.parse_args()
    if args.stale:
        from tests.gpu import checks

        warn_if_stale(args.out, [SANITIZER, *checks.parts()])
        return 0
    if args.part:
        print("ROWS " + json.dumps(part(args.part)))
        return 0
    import torch
    import triton

    import fla_cp.kernels.triton.backend  # noqa: F401, chooses the assembler that the report names
    from tests.gpu import checks

    started, every = time.time(), [SANITIZER, *checks.parts()]
    kept = {} if args.again else kept_rows(args.out)
    done = {name: kept[name] for name in every if all_ok(kept.get(name))}
    facts = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": triton.knobs.nvidia.ptxas.version,
    }
    kernels = kernel_hashes()

    def write() -> dict:
        parts = {name: done[name] for name in every if name in done}
        missing = [name for name in every if name not in done]
        spent = {"seconds": round(time.time() - started)}
        return write_report(args.out, facts | spent, kernels, parts, missing)

    for name, rows in run_parts([x for x in every if x not in done], args.jobs, args.limit):
        done[name] = rows
        write()
    report = write()
    for row in (row for name in every for row in done.get(name, ())):
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    print(
        f"{report['passed']} passed, {report['failed']} failed, parts without a result: "
        f"{report['missing']}"
    )
    return 1 if report["failed"] or report["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
