"""Reports of a run: JSON lines, a progress bar or printed lines, trackers, and a loss plot."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fla_cp.train.config import RunConfig, UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.ending import say_if_possible

if TYPE_CHECKING:
    from fla_cp.train.trackers import Trackers


@dataclass(frozen=True)
class Metrics:
    """One line of metrics.jsonl. A value that was not measured or is not finite is None (null).

    step: 1 for the first update; line 0 has only the held-out loss of the initial weights.
    loss: global mean in nats per target, before this step's update. eval_loss: the held-out loss,
    after the update. grad_norm: global, before clipping. lr: learning rate of this update.
    tokens_per_second: sum over all ranks. peak_memory_bytes: maximum over ranks, of the GPU's
    allocator or, on CPU, of the process. exchange_ms: maximum over ranks of the time that forward
    and backward waited for states, tokens and keys of other ranks; None where exchanges are in CUDA
    graphs and their times are not measured (`kernels.graph_clock`). skipped: steps skipped so far
    because their loss or gradient was not finite. expert_load: with experts, the tokens of the
    busiest expert over the mean of its layer, from 1. mfu: share, in [0, 1], of the GPUs' peak that
    the model's own operations make (`flops.Meter`); None on other devices than H100 and H200.
    exchange_under_way_ms: maximum over ranks of the time from when messages left to the end of the
    wait for them, of which exchange_ms is the part that other work did not hide. slowest_rank: with
    several ranks, the one that waited least for others. wait_ms: how much longer the others waited
    on average. host_ms: the time until the host had issued forward, backward and the sums over
    ranks. device_ms: the time of the same work on the GPU's stream. Both are maxima over ranks.
    tokens: how many tokens the run has read up to this step; None in lines of older versions, which
    did not record it.
    """

    step: int
    loss: float | None
    eval_loss: float | None
    grad_norm: float | None
    lr: float
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int
    exchange_ms: float | None
    skipped: int
    expert_load: float | None = None
    mfu: float | None = None
    exchange_under_way_ms: float | None = None
    slowest_rank: int | None = None
    wait_ms: float | None = None
    host_ms: float | None = None
    device_ms: float | None = None
    tokens: int | None = None

    def finite(self) -> dict[str, Any]:
        """The fields as JSON values: NaN and infinities become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def peak_memory(device: torch.device, *, graphs: bool = False) -> int:
    """Peak bytes so far, of the CUDA allocator or, on CPU, of this process's resident set. graphs:
    count the memory of CUDA graphs, which is reserved but not allocated."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
        return peak(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl.

    Lines that hold no metrics are left out, for example a last line that a crash cut short.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    rows = (_row(line) for line in path.read_bytes().splitlines())
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """The metrics in a line, with None for missing ones; None if the line holds no metrics."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    row = {**{field.name: None for field in fields(Metrics)}, **row}
    values = [row[field.name] for field in fields(Metrics)]
    return row if all(type(value) in (int, float, type(None)) for value in values) else None


class RunLog:
    """Writes and shows the metrics of one run on rank 0; does nothing on the other ranks.

    run: the run folder. start_step: the step of the checkpoint that the run resumes from, or None.
    Lines of later steps that an earlier run wrote are deleted; with None, all of them. trackers:
    started; they get the metrics too and are closed with this log. Collective when it is made;
    raises UserError, on all ranks, if rank 0 cannot write the metrics. Later, what cannot be
    written or shown does not end the run.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        ranks: Ranks,
        start_step: int | None,
        trackers: Trackers | None = None,
    ) -> None:
        self.path, self.config = run / "metrics.jsonl", config
        self.main, self.sharded = ranks.rank == 0, ranks.cp > 1
        self.trackers = trackers
        self.bar = None
        self.rows: list[dict[str, Any]] = []
        self.failed = False  # whether the last line could not be written
        ranks.decide(lambda: self._begin(start_step))
        if not self.main:
            return
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=config.max_steps, initial=start_step or 0, unit="step", dynamic_ncols=True
            )

    def _begin(self, start_step: int | None) -> None:
        """Keeps the lines of metrics up to the step that the run resumes from."""
        rows = read_metrics(self.path.parent) if start_step is not None else []
        self.rows = [row for row in rows if row["step"] <= (start_step or 0)]
        self.stored = len(self.rows)
        partial = self.path.with_name("metrics.jsonl.tmp")
        try:
            partial.write_bytes(_lines(self.rows))
            os.replace(partial, self.path)
        except OSError as error:
            raise UserError(f"--out: metrics cannot be written: {error}") from None

    def print(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if not self.main:
            return
        if self.bar is None:
            say_if_possible(text)
            return
        with suppress(OSError), self.bar.external_write_mode():
            say_if_possible(text)

    def write(self, metrics: Metrics) -> None:
        """Writes the metrics of one step to the file and to the trackers, and shows them."""
        if not self.main:
            return
        row = metrics.finite()
        self.rows.append(row)
        self._store()
        if self.trackers is not None:
            values = {k: v for k, v in row.items() if k != "step" and v is not None}
            self.trackers.log(values, metrics.step)
        self._show(metrics)

    def _store(self) -> None:
        """Appends the lines that the file does not have yet. If the disk is full, for example,
        they are written later."""
        lines = _lines(self.rows[self.stored :])
        try:
            size = os.fstat(self.file.fileno()).st_size
            if self.file.write(lines) < len(lines):
                self.file.truncate(size)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.failed:
                self.print(
                    f"warning: metrics.jsonl cannot be written: {error}; the training goes on, and "
                    "the lines are written as soon as possible"
                )
            self.failed = True
            return
        self.stored, self.failed = len(self.rows), False

    def _show(self, m: Metrics) -> None:
        if self.bar is not None and m.step > 0:
            self.bar.set_postfix_str(_brief(m, self.sharded), refresh=False)
            with suppress(OSError):  # the terminal has gone
                self.bar.update()
        held_out = m.eval_loss is not None
        turn = m.step % self.config.log_every == 0 or m.step in (1, self.config.max_steps)
        if held_out or (self.bar is None and turn):
            text = f"step {m.step:>5}/{self.config.max_steps}"
            if m.step > 0:
                text += f"  {_brief(m, self.sharded)}"
            self.print(text + (f"  held-out {m.eval_loss:.4f}" if held_out else ""))

    def close(self) -> None:
        if not self.main:
            return
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
        if self.failed:
            self._store()
        if self.failed:
            missing = len(self.rows) - self.stored
            self.print(f"warning: metrics.jsonl lacks the last {missing} lines")
        self.file.close()
        if self.trackers is not None:
            self.trackers.close()


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _brief(m: Metrics, sharded: bool) -> str:
    """The metrics in one line. sharded: with the time of exchanges."""
    speed = [f"MFU {100 * m.mfu:.1f}%"] if m.mfu is not None else []
    parts = [
        f"loss {m.loss:.4f}",
        f"norm {m.grad_norm:.2f}",
        f"lr {m.lr:.1e}",
        f"{_thousands(m.tokens_per_second)} tokens/s",
        f"({_thousands(m.tokens_per_second_per_gpu)} a rank)",
        *speed,
        f"{m.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    if m.device_ms is not None:
        parts.append(f"GPU {m.device_ms:.0f} ms, host {m.host_ms:.0f} ms")
    if sharded and m.exchange_ms is not None:
        under_way = m.exchange_under_way_ms
        total = f" of {under_way:.1f}" if under_way is not None else ""
        parts.append(f"exchange {m.exchange_ms:.1f}{total} ms")
    if m.slowest_rank is not None:
        parts.append(f"rank {m.slowest_rank} slowest by {m.wait_ms:.1f} ms")
    if m.expert_load is not None:
        parts.append(f"load {m.expert_load:.2f}")
    if m.skipped:
        parts.append(f"skipped {m.skipped}")
    return "  ".join(parts)


def _thousands(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def plot_losses(run: Path, rows: list[dict[str, Any]], title: str) -> str:
    """Draws train and held-out loss by step as RUN/loss.png; returns a line about the plot."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no loss plot: matplotlib is not installed (extra `plot`)"
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    def series(name: str) -> tuple[list[int], list[float]]:
        points = [(row["step"], row[name]) for row in rows if row[name] is not None]
        return [step for step, _ in points], [value for _, value in points]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*series("loss"), color="tab:blue", linewidth=1, label="train")
    axes.plot(*series("eval_loss"), "o-", color="tab:orange", label="held-out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")  # to search for the best place can take seconds
    try:
        figure.savefig(run / "loss.png", dpi=120)
    except OSError as error:  # such as a full disk
        return f"no loss plot: {error}"
    return f"loss plot: {run / 'loss.png'}"
