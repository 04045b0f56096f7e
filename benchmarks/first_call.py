"""How long the first call of a process takes, a call with another T, and one with a warm cache.

    python -m benchmarks.first_call [--ops kda,gdn] [--tokens 32768,8192,16383,65536] [--out FILE]

Each row is a process of its own, which runs one operator forward and backward for each T in turn:
"one by one" with an empty Triton cache and one compiling thread, "side by side" with an empty cache
and the default number of threads, "warm cache" with the cache that "side by side" left. Seconds are
of the host until the GPU is done. Imports are separate, and so is torch's first gradient, for which
it starts CUDA. On a machine without a GPU the torch stages run, on few tokens."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import units

MODES = ("one by one", "side by side", "warm cache")
UNIT = units.FIRST_CALL

AGAIN = 3
"""Calls with the first T after the first call; the fastest is what a call takes from then on."""


def measure(op: str, tokens: list[int], heads: int) -> dict:
    """The times of this process in seconds. `compiled`: kernels that Triton compiled."""
    at = [time.perf_counter()]

    def lap() -> float:
        at.append(time.perf_counter())
        return round(at[-1] - at[-2], 3)

    import torch

    row: dict = {"import torch": lap()}
    import fla_cp

    row["import fla_cp"] = lap()
    from benchmarks.members import MEMBERS
    from benchmarks.ops import runner
    from benchmarks.shapes import Shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiled = [0, 0]
    if device == "cuda":
        import triton

        def listen(*, cache_hit: bool, **_: object) -> None:
            compiled[cache_hit] += 1

        triton.knobs.compilation.listener = listen

    def done() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(call: Callable[[], tuple]) -> dict:
        compiled[:] = 0, 0
        lap()
        results = call()
        done()
        found = {"s": lap(), "compiled": compiled[0], "loaded": compiled[1]}
        # the bits as integers, whose sum does not depend on an order
        found["bits"] = [int(x.contiguous().view(torch.uint8).sum()) for x in results]
        return found

    lap()
    x = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.ones_like(x))  # torch imports more for its first one
    done()
    row["start torch"] = lap()
    member = MEMBERS[op]
    row["calls"] = []
    for T in tokens:
        size = {"K": 16, "V": 16} if device == "cpu" else {}
        shape = Shape(f"T={T}", T, H=heads, HV=heads, **size)
        run = runner(getattr(fla_cp, member.ours), member, shape, device)["both"]
        done()
        first = timed(run)
        again = min(timed(run)["s"] for _ in range(AGAIN))
        row["calls"].append({"T": T, "first": first, "again": again})
    return row


def process(arguments: list[str], cache: str, mode: str) -> dict:
    """The row of a new process."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    environment.pop("FLA_CP_COMPILE_THREADS", None)
    if mode == "one by one":
        environment["FLA_CP_COMPILE_THREADS"] = "1"
    command = [sys.executable, "-m", "benchmarks.first_call", "--here", *arguments]
    started = time.perf_counter()
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict = json.loads(result.stdout.splitlines()[-1])
    return row | {"process": round(time.perf_counter() - started, 3)}


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    tokens = "32768,8192,16383,65536" if on_gpu else "256,300"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--ops", default="kda,gdn", help="names of benchmarks.members")
    parser.add_argument("--tokens", default=tokens, help="in the order of their calls")
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from benchmarks.ops import environment
    from benchmarks.report_tables import Result, first_calls

    rows: list[dict] = []
    for op in args.ops.split(","):
        with tempfile.TemporaryDirectory() as serial, tempfile.TemporaryDirectory() as cache:
            for mode in MODES:
                given = [op, args.tokens, str(args.heads)]
                row = process(given, serial if mode == MODES[0] else cache, mode)
                rows.append({"operator": op, "mode": mode, **row})
                if args.out:
                    found = {**environment(), "unit": UNIT, "heads": args.heads, "rows": rows}
                    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(first_calls(Result("first-call", {"rows": rows})))
    for op in args.ops.split(","):
        bits = [[c["first"]["bits"] for c in r["calls"]] for r in rows if r["operator"] == op]
        if any(other != bits[0] for other in bits):
            raise SystemExit(f"{op}: results depend on how the kernels were compiled")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        op, listed, heads = sys.argv[2:]
        print(json.dumps(measure(op, [*map(int, listed.split(","))], int(heads))))
    else:
        main()
