"""Tokens/s and memory that the examples with models of transformers print, by length, as JSON.

    python -m benchmarks.example_figures [--gpus 1] [--tokens 65536,131072,262144] [--out FILE]
    python -m benchmarks.example_figures --script accelerate_hybrid.py ..

Each length is one start of the example by its launcher. The first step compiles kernels, so it has
a column of its own, and tokens/s is the median of the later steps. A length that does not fit into
memory, or does not end within --limit seconds, has a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import units
from benchmarks.ops import environment

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "transformers_hybrid.py": "torch.distributed.run --standalone --nproc-per-node {gpus} {script}",
    "accelerate_hybrid.py": (
        "accelerate.commands.accelerate_cli launch --use_fsdp --fsdp_version 2 --main_process_port "
        "0 --num_processes {gpus} --mixed_precision bf16 {script} --cp {gpus}"
    ),
}
"""The module that starts a script of examples/ on so many ranks, and its arguments."""

LINE = re.compile(r"step (\d+): loss (\S+), (\d+) tokens/s, (\S+) GiB")
UNIT = units.EXAMPLE


def started(command: list[str], limit: float) -> tuple[str, str | None, float]:
    """What a command prints, why it failed or None, and its seconds."""
    begin, late = time.monotonic(), False
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # launchers run the script alone
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT, env=here)
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
            child.terminate()  # the launcher ends its ranks
            child.wait()
        seconds = time.monotonic() - begin
        for file in (out, errors):
            file.seek(0)
        printed, said = out.read(), errors.read()
    if late:
        return printed, f"did not end within {limit:.0f} s", seconds
    if child.returncode == 0:
        return printed, None, seconds
    if "OutOfMemoryError" in said:
        return printed, "out of memory", seconds
    raise SystemExit(f"{' '.join(command)} failed:\n{said[-2000:]}")


def row(tokens: int, gpus: int, printed: str, error: str | None, seconds: float) -> dict[str, Any]:
    """The row of one length, from the lines of its steps. error: why it did not end, or None."""
    steps = LINE.findall(printed)
    speeds = [int(speed) for _, _, speed, _ in steps]
    found: dict[str, Any] = {"tokens": tokens, "gpus": gpus, "steps": len(steps)}
    found |= {"wall_s": round(seconds, 1)} | ({"error": error} if error else {})
    if speeds:
        found["first_step_s"] = round(tokens / speeds[0], 2)
        found["peak_gib"] = float(steps[-1][3]) or None  # 0.00 without a GPU
    if speeds[1:]:
        found["tokens_per_second"] = statistics.median(speeds[1:])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--script", choices=LAUNCHERS, default=next(iter(LAUNCHERS)))
    parser.add_argument("--tokens", default="65536,131072,262144", help="separated by commas")
    parser.add_argument("--gpus", type=int, default=1, help="ranks, on CPUs without GPUs")
    parser.add_argument("--steps", type=int, default=3, help="at least 2")
    parser.add_argument("--shape", default="", help="of the example, such as num_hidden_layers=8")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for a length")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    script = ROOT / "examples" / args.script
    launch = [word.format(gpus=args.gpus, script=script) for word in LAUNCHERS[args.script].split()]
    report = {**environment(), "unit": UNIT, "benchmark": "example", "shape": args.shape}
    report["script"] = args.script
    rows: list[dict[str, Any]] = []
    for tokens in map(int, args.tokens.split(",")):
        flags = ["--tokens", str(tokens), "--steps", str(args.steps)]
        flags += ["--shape", *args.shape.split()] if args.shape else []
        command = [sys.executable, "-m", *launch, *flags]
        rows.append(row(tokens, args.gpus, *started(command, args.limit)))
        print(rows[-1], flush=True)
        if args.out is not None:
            text = json.dumps({**report, "rows": rows}, indent=1)
            args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
