"""How much a tiny model recalls of needles after a minute of training on a CPU, as JSON.

    python -m benchmarks.recall [--seeds 0,1,2] [--out RESULT.json]
    python -m benchmarks.recall --draw RESULT.json --picture docs/recall.png

Each seed is a training as docs/evaluation.md has it, and then an evaluation of its run. Other seeds
that --out has already are kept. The second form draws a result: the mean share over the seeds, by
length and depth.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import report_tables, units
from benchmarks.ops import environment
from benchmarks.plot import pyplot
from benchmarks.report_tables import Result

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "--data needle:128 --seq-len 512 --global-batch-size 4 --max-steps 150"
"""The options of the training in docs/evaluation.md."""

LENGTHS, DEPTHS, COUNT = (32, 128, 512, 2048, 8192), 5, 8
"""Tokens of a document, depths of the needle in it, and needles of each kind."""

UNIT = units.RECALL


def script(name: str, *words: str) -> str:
    """What a program of launch/ prints. Raises SystemExit with its errors if it fails."""
    command = [sys.executable, str(ROOT / "launch" / name), *words, "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def processor_seconds() -> float:
    """What the child processes that have ended took, over all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(seed: int, folder: Path, training: str, lengths: Sequence[int]) -> dict[str, Any]:
    """The row of one seed. folder: for the run. training: options of the trainer."""
    run, began, used = folder / f"seed-{seed}", time.monotonic(), processor_seconds()
    script("train.py", *training.split(), "--seed", str(seed), "--out", str(run))
    spent = {"training_s": time.monotonic() - began, "cpu_s": processor_seconds() - used}
    asked = ["--needle", ",".join(map(str, lengths)), "--needle-depths", str(DEPTHS)]
    asked += ["--needle-count", str(COUNT), "--out", str(folder / "a.png")]
    script("evaluate.py", str(run), "--packs", "0", *asked)
    found = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    cores = len(os.sched_getaffinity(0))
    spent = {name: round(seconds, 1) for name, seconds in spent.items()}
    return {"seed": seed, "cores": cores, **spent, "recall": found["needle"]}


def mean_recall(result: dict[str, Any]) -> dict[int, dict[float, float]]:
    """The mean share of right answers over the seeds, by length and depth."""
    tables = [run["recall"] for run in result["runs"]]
    return {
        int(length): {float(depth): fmean(t[length][depth] for t in tables) for depth in row}
        for length, row in tables[0].items()
    }


def table(result: Result) -> str:
    """The mean recall as a table."""
    shares = mean_recall(result.data)
    depths = [f"depth {depth:g}" for depth in next(iter(shares.values()))]
    rows = [[str(length), *(f"{x:.0%}" for x in row.values())] for length, row in shares.items()]
    return report_tables.table(["length", *depths], rows)


def draw(result: dict[str, Any], out: Path) -> None:
    """Writes a picture of a result: a field for each length and depth, with its share."""
    recall, plt = mean_recall(result), pyplot()
    lengths, depths = list(recall), list(recall[next(iter(recall))])
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    grid = [[recall[length][depth] for length in lengths] for depth in depths]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, row in enumerate(grid):
        for x, share in enumerate(row):
            axes.text(x, y, f"{share:.0%}", ha="center", va="center")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths])
    seeds = len(result["runs"])
    axes.set(xlabel="length of the document (tokens)", ylabel="depth of the needle")
    axes.set_title(f"Share of needles recalled, mean of {seeds} trainings")
    figure.colorbar(image, ax=axes)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes a result, or draws one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--seeds", default="0,1,2", help="a training for each, such as 0,1,2")
    parser.add_argument("--out", type=Path, default=Path("recall.json"))
    parser.add_argument("--draw", type=Path, help="a result to draw; nothing is measured")
    parser.add_argument("--picture", type=Path, default=Path("recall.png"))
    args = parser.parse_args(argv)
    if args.draw is not None:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), args.picture)
        return
    facts = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": environment()["commit"],
        "device": "CPU",
        "unit": UNIT,
        "training": TRAINING,
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, args.seeds.split(",")):
            row = measured(seed, Path(folder), TRAINING, LENGTHS)
            print(json.dumps(row), flush=True)
            known = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
            others = [run for run in known if run["seed"] != seed]
            runs = sorted([*others, row], key=lambda run: run["seed"])
            args.out.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
