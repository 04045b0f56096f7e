"""Entry point of `fla-cp-plot`: the losses and the speed of several runs in one picture.

    fla-cp-plot runs/a runs/b --out comparison.png

It reads metrics.jsonl of each run folder, also while the run goes on.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla_cp.train.arguments import Parser
from fla_cp.train.config import UserError
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.metrics import read_metrics
from fla_cp.train.parse import load_toml

WARM = 2
"""The first steps of a run, which compile and do not count as its speed."""

AXES = ("step", "tokens")

Points = tuple[list[float], list[float]]
"""Positions on the horizontal axis, and the values there."""


@dataclass(frozen=True)
class Run:
    """A run to draw. rows: the lines of its metrics. axis: one of AXES, which each line has."""

    label: str
    rows: list[dict[str, Any]]
    axis: str = "step"

    def series(self, name: str, *, warm: int = 0) -> Points:
        """The measured values of a metric. warm: leaves out so many of the first steps."""
        rows = [r for r in self.rows if r[name] is not None]
        rows = [r for r in rows if r["step"] >= rows[0]["step"] + warm]
        return [r[self.axis] for r in rows], [r[name] for r in rows]


def read_runs(folders: Sequence[Path], axis: str) -> list[Run]:
    """The runs of these folders, each with a label of its own. A folder that is given twice counts
    once.

    axis: one of AXES. Raises UserError for a folder without metrics or, for tokens, with neither
    their numbers in its metrics nor a configuration.
    """
    given: dict[Path, Path] = {}
    for folder in folders:
        given.setdefault(folder.resolve(), folder)
    runs = []
    for folder, label in zip(given.values(), labels([*given]), strict=True):
        try:
            rows = read_metrics(folder)
        except OSError as error:
            raise UserError(f"RUN: cannot read {error.filename}: {error.strerror}") from None
        if not rows:
            raise UserError(f"RUN must be a run folder with lines in metrics.jsonl, got {folder}")
        runs.append(Run(label, with_tokens(rows, folder) if axis == "tokens" else rows, axis))
    return runs


def with_tokens(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """These lines of metrics, each with the number of tokens that the run had read up to it.

    Versions before the trainer recorded that number left it out. Their steps count as equally
    large: if a later version continued the run, as the mean of all steps up to its first line,
    otherwise as config.toml says.
    """
    if all(r["tokens"] is not None for r in rows):
        return rows
    known = [r["tokens"] / r["step"] for r in rows if r["tokens"] is not None and r["step"]]
    if known:
        each = known[0]
    elif (folder / "config.toml").exists():
        data = load_toml(folder / "config.toml").data
        each = data.global_batch_size * data.seq_len
    else:
        raise UserError(
            "--x tokens needs config.toml of a run whose metrics.jsonl does not count tokens, "
            f"which {folder} lacks"
        )
    return [r if r["tokens"] is not None else {**r, "tokens": each * r["step"]} for r in rows]


def labels(paths: Sequence[Path]) -> list[str]:
    """The shortest end of each absolute path that no other of them has, at least its last name."""

    def label(parts: tuple[str, ...], others: list[tuple[str, ...]]) -> str:
        count = 1
        while any(parts[-count:] == other[-count:] for other in others):
            count += 1
        return str(Path(*parts[-count:]))

    return [label(a.parts, [b.parts for b in paths if b != a]) for a in paths]


def smoothed(values: Sequence[float], steps: int) -> list[float]:
    """The mean of each value and the up to `steps` - 1 before it."""
    found, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - steps] if i >= steps else 0.0)
        found.append(total / min(i + 1, steps))
    return found


def check_picture(out: Path) -> None:
    """Raises UserError for an --out that is no picture or in no folder. Only rank 0 writes it."""
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if out.suffix[1:].lower() not in kinds:  # without a suffix, matplotlib would add one
        raise UserError(f"--out must end in one of .{', .'.join(kinds)}, got {out}")
    if os.environ.get("RANK", "0") == "0" and not out.parent.is_dir():
        raise UserError(f"--out must be in a folder that exists, got {out}")


def draw(runs: Sequence[Run], out: Path, *, axis: str = "step", smooth: int = 1) -> None:
    """Writes the picture: the losses of all runs, and below them their tokens/s.

    A held-out loss has a marker. smooth: how many steps a line is the mean of. The
    single steps are drawn pale behind the line. Raises UserError without matplotlib, or for a file
    that it cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("fla-cp-plot needs matplotlib: pip install 'fla_cp[plot]'") from None

    check_picture(out)
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for n, run in enumerate(runs):
        color = f"C{n % 10}"
        for axes, name, warm in ((losses, "loss", 0), (speeds, "tokens_per_second", WARM)):
            x, y = run.series(name, warm=warm)
            if smooth > 1:
                axes.plot(x, y, color=color, linewidth=0.6, alpha=0.3)
            label = run.label if axes is losses else None
            axes.plot(x, smoothed(y, smooth), color=color, linewidth=1.2, label=label)
        losses.plot(*run.series("eval_loss"), "o", color=color, markersize=4)
    if any(run.series("eval_loss")[0] for run in runs):
        losses.plot([], [], "o", color="gray", markersize=4, label="held-out")
    losses.set(ylabel="loss (nats per token)")
    speeds.set(ylabel="tokens/s", xlabel=axis)
    speeds.set_ylim(bottom=0)
    losses.legend(loc="upper right")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:  # such as a full disk
        raise UserError(
            f"--out must be a picture that can be written, got {out}: {error}"
        ) from None


def table(runs: Sequence[Run]) -> str:
    """A line for each run: its last step and losses, its median speed and its peak memory."""
    heads = ("run", "step", "loss", "held-out", "tokens/s", "MFU", "peak GiB")
    lines = [heads, *(_line(run) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def text(line: Sequence[str]) -> str:
        values = [f"{cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *values])

    return "\n".join(map(text, lines))


def _line(run: Run) -> tuple[str, ...]:
    def last(name: str) -> str:
        values = run.series(name)[1]
        return f"{values[-1]:.4f}" if values else "-"

    def median(name: str, factor: float, form: str) -> str:
        values = run.series(name, warm=WARM)[1]
        return format(factor * statistics.median(values), form) if values else "-"

    peak = [r["peak_memory_bytes"] for r in run.rows if r["peak_memory_bytes"] is not None]
    return (
        run.label,
        str(run.rows[-1]["step"]),
        last("loss"),
        last("eval_loss"),
        median("tokens_per_second", 1, ".0f"),
        median("mfu", 100, ".1f") + ("%" if run.series("mfu", warm=WARM)[1] else ""),
        f"{max(peak) / 2**30:.2f}" if peak else "-",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draws as the arguments say and returns the exit code, see fla_cp/train/exit_codes.py."""
    parser = Parser(
        "fla-cp-plot", description="Draws losses and tokens/s of runs into one picture."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    out = "picture to write; its ending says which kind (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs.png"), help=out)
    axis = "horizontal axis: steps, or tokens read so far (default: %(default)s)"
    parser.add_argument("--x", choices=AXES, default="step", help=axis)
    smooth = "draw means of so many steps (default: %(default)s, which draws each step)"
    parser.add_argument("--smooth", type=int, default=1, metavar="STEPS", help=smooth)
    given = parser.parse_args(argv)
    try:
        if given.smooth < 1:
            raise UserError(f"--smooth must be at least 1, got {given.smooth}")
        runs = read_runs(given.runs, given.x)
        draw(runs, given.out, axis=given.x, smooth=given.smooth)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    say(table(runs))
    say(f"picture: {given.out}")
    return 0
