"""Runs the benchmarks that docs/performance.md is made of, one after the other.

    python -m benchmarks.measure --gpus 1 --limit 550 --out FOLDER

Each writes FOLDER/NAME.json, under the name that the file has in benchmarks/results/current. The
dear ones come last. One that has a result there already is left out, so a second call goes on where
the first one stopped (`benchmarks.train` itself leaves out the cases that its file has). A
benchmark that would not end within --limit is not started. Nothing is copied into the repository:
look at the results, copy them, and run `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Run(NamedTuple):
    """One result. arguments: of `python -m benchmarks.MODULE`, which also takes --out. seconds: its
    time on one H200 with cold caches, or more. gpus: how many it needs."""

    name: str
    module: str
    arguments: str
    seconds: int
    gpus: int = 1


FLA = "--peer fla"
ZIGZAG = "--layouts zigzag --together 1"

RUNS = (
    Run("host", "host", "--packings", 150),
    Run("layer-host", "layer_host", "", 60),
    Run("first-call", "first_call", "", 90),
    Run("loss", "loss", "", 40),
    Run("remat", "remat", "", 60),
    Run("kda", "ops", "--op kda", 90),
    Run("gdn-layer", "ops", "--op gdn-layer", 90),
    Run("precision", "precision", "", 60),
    Run("attention", "attention", "", 90),
    Run("decode", "decode", "", 90),
    Run("train-340M", "train", "--models 340M --gpus 1 --flags=--cuda-graphs --profile", 180),
    Run("train-1.3B", "train", "--models 1.3B --seq-len 32768 --gpus 1 --profile", 150),
    Run("example", "example_figures", "--tokens 65536,131072", 300),
    Run("cp", "cp_scaling", "", 240, gpus=2),
    Run("exchange", "exchange", "2", 60, gpus=2),
    Run("attention-2-gpus", "attention", "--ranks 2", 120, gpus=2),
    Run("hybrid", "hybrid", "--ranks 1,2 --tokens 65536", 120, gpus=2),
    Run("hybrid-131072", "hybrid", f"--ranks 1,2 --tokens 131072 {ZIGZAG}", 150, gpus=2),
    Run("train-2-gpus", "train", "--models 340M --seq-len 65536 --gpus 1,2", 240, gpus=2),
    Run("example-2-gpus", "example_figures", "--gpus 2 --tokens 262144 --steps 3", 200, gpus=2),
    Run("train", "train", f"--models 340M --seq-len 65536 --gpus 1 --profile {FLA}", 540),
    Run("kda-fla", "ops", f"--op kda --shapes target {FLA}", 480),
)


def command(run: Run, folder: Path) -> list[str]:
    out = ["--out", str(folder / f"{run.name}.json")]
    return [sys.executable, "-m", f"benchmarks.{run.module}", *run.arguments.split(), *out]


def chosen(only: list[str] | None, gpus: int, folder: Path) -> list[Run]:
    """The runs that are wanted, possible and not yet done."""
    unknown = sorted(set(only or ()) - {run.name for run in RUNS})
    if unknown:
        raise SystemExit(f"--only must be of {', '.join(r.name for r in RUNS)}, got {unknown[0]}")
    return [
        run
        for run in RUNS
        if (only is None or run.name in only)
        and run.gpus <= gpus
        and (run.module == "train" or not (folder / f"{run.name}.json").exists())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="how many there are")
    parser.add_argument("--only", type=lambda s: s.split(","), help="names, separated by commas")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), []
    for run in chosen(args.only, args.gpus, args.out):
        left = args.limit - (time.monotonic() - begin)
        if run.seconds > left:
            print(f"{run.name}: needs {run.seconds} s, {left:.0f} are left", flush=True)
            continue
        print(f"{run.name}: {' '.join(command(run, args.out)[1:])}", flush=True)
        start = time.monotonic()
        ok = subprocess.run(command(run, args.out), cwd=ROOT).returncode == 0
        print(f"{run.name}: {'done' if ok else 'FAILED'}, {time.monotonic() - start:.0f} s")
        failed += [] if ok else [run.name]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
