"""Runs the benchmarks that docs/performance.md is made of, on several GPUs side by side.

    python -m benchmarks.measure --gpus 2 --limit 550 --out FOLDER

Each writes FOLDER/NAME.json, under the name that the file has in benchmarks/results/current, and
prints into FOLDER/NAME.txt. A run starts as soon as so many GPUs are free as it needs, in the order
of the list; those that time the host run alone. One that has a result there already is left out, so
a second call goes on where the first one stopped (`benchmarks.train` itself leaves out the cases
that its file has). A benchmark that would not end within --limit is not started, and one that has
not ended by then is stopped. Nothing is copied into the repository: look at the results, copy them,
and run `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAUSE = 0.2
"""Seconds between two looks at what runs."""


class Run(NamedTuple):
    """One result. arguments: of `python -m benchmarks.MODULE`, which also takes --out. seconds: its
    time on one H200 with cold caches, or more. gpus: how many it needs. alone: whether others would
    change what it measures, which is so for times of the host."""

    name: str
    module: str
    arguments: str
    seconds: int
    gpus: int = 1
    alone: bool = False


FLA = "--peer fla"
GRAPHS = "--cuda-graphs"
ZIGZAG = "--layouts zigzag --together 1"
ACCELERATE = "--script accelerate_hybrid.py --gpus 2 --tokens 262144"

RUNS = (
    Run("host", "host", "--packings", 150, alone=True),
    Run("layer-host", "layer_host", "", 60, alone=True),
    Run("first-call", "first_call", "", 90, alone=True),
    Run("loss", "loss", "", 40),
    Run("remat", "remat", "", 60),
    Run("kda", "ops", "--op kda", 90),
    Run("gdn-layer", "ops", "--op gdn-layer", 90),
    Run("precision", "precision", "", 60),
    Run("attention", "attention", "", 90),
    Run("decode", "decode", "", 90, alone=True),
    Run("train-340M", "train", f"--models 340M --gpus 1 --flags={GRAPHS} --profile", 180, 1, True),
    Run("train-1.3B", "train", "--models 1.3B --seq-len 32768 --gpus 1 --profile", 150, 1, True),
    Run("example", "example_figures", "--tokens 65536,131072", 300),
    Run("cp", "cp_scaling", "", 240, gpus=2),
    Run("exchange", "exchange", "2", 60, gpus=2),
    Run("attention-2-gpus", "attention", "--ranks 2", 120, gpus=2),
    Run("hybrid", "hybrid", "--ranks 1,2 --tokens 65536", 120, gpus=2),
    Run("hybrid-131072", "hybrid", f"--ranks 1,2 --tokens 131072 {ZIGZAG}", 150, gpus=2),
    Run("train-2-gpus", "train", "--models 340M --seq-len 65536 --gpus 1,2", 240, gpus=2),
    Run("example-2-gpus", "example_figures", "--gpus 2 --tokens 262144 --steps 3", 200, gpus=2),
    Run("example-accelerate-2-gpus", "example_figures", f"{ACCELERATE} --steps 3", 250, gpus=2),
    Run("cp-4-gpus", "cp_scaling", "--ranks 1,2,4 --tokens 131072 --local 8192", 300, gpus=4),
    Run("exchange-4-gpus", "exchange", "4", 60, gpus=4),
    Run("attention-4-gpus", "attention", "--ranks 4 --tokens 32768", 120, gpus=4),
    Run("hybrid-4-gpus", "hybrid", f"--ranks 1,4 --tokens 131072 {ZIGZAG}", 180, gpus=4),
    Run("train-4-gpus", "train", "--models 340M --seq-len 65536,131072 --gpus 1,2,4", 480, gpus=4),
    Run("train-1.3B-4-gpus", "train", "--models 1.3B --seq-len 65536 --gpus 2,4", 360, gpus=4),
    Run("cp-8-gpus", "cp_scaling", "--ranks 1,4,8 --tokens 131072 --local 8192", 300, gpus=8),
    Run("exchange-8-gpus", "exchange", "8", 60, gpus=8),
    Run("train-8-gpus", "train", "--models 340M,1.3B --seq-len 131072 --gpus 8", 360, gpus=8),
    Run("train", "train", f"--models 340M --seq-len 65536 --gpus 1 --profile {FLA}", 540, 1, True),
    Run("decays-kda", "decays", "--op kda --peers fla,cudnn", 480),
    Run("decays-gdn", "decays", "--op gdn --peers flashqla,fla", 480),
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


class Started(NamedTuple):
    run: Run
    process: subprocess.Popen[bytes]
    gpus: list[int]
    begin: float


def start(run: Run, gpus: list[int], folder: Path) -> Started:
    """The run in a process group of its own, which sees these GPUs only."""
    print(f"{run.name}: {' '.join(command(run, folder)[1:])}", flush=True)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [seen[n] if len(seen) > n and seen[n] else str(n) for n in gpus]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names)}
    with (folder / f"{run.name}.txt").open("wb") as said:
        process = subprocess.Popen(
            command(run, folder), cwd=ROOT, env=environment, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    return Started(run, process, gpus, time.monotonic())


def stop(started: Started) -> None:
    """Ends the run and the processes that it has started."""
    for signal in (SIGTERM, SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal)
        with suppress(subprocess.TimeoutExpired):
            started.process.wait(5)
            return


def measured(runs: list[Run], gpus: int, limit: float, folder: Path) -> dict[str, str]:
    """What became of each run: "done", "FAILED", "stopped" or "not started"."""
    begin, waiting, running = time.monotonic(), list(runs), list[Started]()
    outcome, free = {}, list(range(gpus))
    while waiting or running:
        left = limit - (time.monotonic() - begin)
        for started in list(running):
            if started.process.poll() is None and left > 0:
                continue
            ended = started.process.poll()
            stop(started)
            word = "stopped" if ended is None else "FAILED" if ended else "done"
            outcome[started.run.name] = word
            print(
                f"{started.run.name}: {word}, {time.monotonic() - started.begin:.0f} s", flush=True
            )
            running.remove(started)
            free = sorted([*free, *started.gpus])
        for run in [run for run in waiting if run.seconds > left]:
            print(f"{run.name}: needs {run.seconds} s, {max(0, left):.0f} are left", flush=True)
            outcome[run.name] = "not started"
            waiting.remove(run)
        busy = any(started.run.alone for started in running)
        fits = (r for r in waiting if r.gpus <= len(free) and not (busy or (r.alone and running)))
        if (run := next(fits, None)) is not None:
            waiting.remove(run)
            running.append(start(run, free[: run.gpus], folder))
            free = free[run.gpus :]
        else:
            time.sleep(PAUSE)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="how many there are")
    parser.add_argument("--only", type=lambda s: s.split(","), help="names, separated by commas")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = chosen(args.only, args.gpus, args.out)
    outcome = measured(runs, args.gpus, args.limit, args.out)
    for name, word in outcome.items():
        print(f"{name}: {word}")
    return 1 if {"FAILED", "stopped"} & set(outcome.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
