"""Trains a KDA language model with the sequence sharded over ranks.

torchrun --nproc-per-node 4 launch/train.py --cp 4
torchrun launch/train.py --cp 4          # launches its four ranks itself
fla-cp-train --config runs/x/config.toml --resume auto
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

if __package__ in (None, ""):  # run by path from a clone: this folder is on sys.path, not the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from accelerate.utils import set_seed

from fla_cp.comm import measure_exchange
from launch import checkpoint
from launch.config import TrainConfig, UserError, parse, to_toml
from launch.data import PackedDataset, build_dataset
from launch.distributed import Ranks, compute_dtype, describe, joined, launch, shard_model
from launch.metrics import Metrics, RunLog, peak_memory, plot_losses, read_metrics
from launch.model import build_model
from launch.parity import compare, write_report
from launch.saver import Saver
from launch.step import (
    HeldOut,
    agree,
    build_optimizer,
    forward_backward,
    learning_rate,
    micro_batches,
    reduce_metrics,
    update,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses flags and trains; the exit code. 2 is a user's mistake, 1 a failed parity check."""
    argv = list(sys.argv[1:] if argv is None else argv)
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(argv, quiet=not first)
        code = launch(config.parallel, argv)
        if code is None:
            with joined(config.parallel) as ranks:
                code = check_parity(config, ranks) if config.parity.check else train(config, ranks)
    except UserError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        code = 2
    return code


def check_parity(config: TrainConfig, ranks: Ranks) -> int:
    """Runs --check-parity; 0 if it holds, 1 if it fails."""
    run, _ = open_run(config, ranks)
    write_config(config, run, ranks)
    dataset = load_data(config, "train")
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    if ranks.rank == 0:
        print(f"{describe(ranks, dtype)}; comparing {config.parity.steps} steps with one rank")
    report = compare(config, dataset, ranks)
    failed = 0.0
    if report is not None:
        print(report.table())
        print(f"report: {write_report(report, run)}", flush=True)
        failed = float(not report.passed)
    return int(ranks.host_max([failed])[0])


def load_data(config: TrainConfig, split: str) -> PackedDataset:
    """The packs of one split. Raises UserError where the data set cannot be had."""
    try:
        return build_dataset(config.data.source, config.data.seq_len, split, config.run.seed)
    except (ValueError, OSError) as error:
        raise UserError(f"--data: {error}") from error


def open_run(config: TrainConfig, ranks: Ranks) -> tuple[Path, Path | None]:
    """The run folder and the checkpoint to resume from, the same on all ranks.

    Rank 0 looks and makes the folder; all ranks verify the checkpoint. Raises UserError, on all
    ranks, for a --resume path without a whole checkpoint or a folder that holds another run.
    """
    answer = {"run": "", "found": [], "problem": ""}
    if ranks.rank == 0:
        try:
            run = Path(_run_folder(config))
            found = checkpoint.find(config.run.resume, run)
            inside = found and run.resolve() in found[0].resolve().parents
            continues = config.run.resume == "auto" or inside
            if read_metrics(run) and not continues and not config.parity.check:
                raise UserError(
                    f"--out {run} already holds a run; continue it with --resume auto, or name "
                    "another folder"
                )
            run.mkdir(parents=True, exist_ok=True)
            answer |= {"run": str(run), "found": [str(path) for path in found]}
        except (UserError, OSError) as error:
            answer["problem"] = str(error)
    answer = json.loads(ranks.broadcast(json.dumps(answer)))
    if answer["problem"]:
        raise UserError(answer["problem"])

    def say(line: str) -> None:
        if ranks.rank == 0:
            print(line, flush=True)

    run, found = Path(answer["run"]), [Path(path) for path in answer["found"]]
    trust = config.run.trust_checkpoint
    whole, damaged = checkpoint.newest_whole(found, config.run.resume, trust, ranks, say)
    if ranks.rank == 0:
        for note in checkpoint.set_aside(run, damaged):
            say(note)
    return run, whole


def write_config(config: TrainConfig, run: Path, ranks: Ranks) -> None:
    """Writes RUN/config.toml on rank 0, once it is sure that this configuration will run: until
    then, it is the one with which a refused resume can go on. Raises UserError on all ranks."""
    problem = ""
    if ranks.rank == 0:
        resolved = dataclasses.replace(config.run, out=str(run))
        try:
            text = to_toml(dataclasses.replace(config, run=resolved))
            (run / "config.toml").write_text(text)
        except OSError as error:
            problem = f"--out: {error}"
    if problem := ranks.broadcast(problem):
        raise UserError(problem)


def _run_folder(config: TrainConfig) -> str:
    if config.run.out is not None:
        return config.run.out
    suffix = config.model.size + ("-parity" if config.parity.check else "")
    if config.run.resume == "auto":
        # one whose checkpoints are all damaged counts, too: an older run must not take its place
        runs = [run for run in Path("runs").glob(f"*-{suffix}") if checkpoint.find("auto", run)]
        if runs:
            return str(max(runs, key=lambda run: run.name))
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}-{suffix}"


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT received inside the block, which no longer end the process."""
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(s, lambda number, _: received.append(number)) for s in signals]
    try:
        yield received
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def train(config: TrainConfig, ranks: Ranks) -> int:
    """Trains to --max-steps or until asked to stop; writes everything into the run folder."""
    run, found = open_run(config, ranks)
    set_seed(config.run.seed)
    data = load_data(config, "train")
    valid = load_data(config, "valid") if config.run.eval_every else None
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    facts = checkpoint.facts(config, data.vocab_size, len(data), dtype)
    differences = checkpoint.check_matches(found, facts) if found is not None else []
    write_config(config, run, ranks)
    model = build_model(config.model, data.vocab_size, config.run.seed).to(ranks.device)
    parameters = sum(p.numel() for p in model.parameters())
    shard_model(model, ranks, dtype)
    optimizer = build_optimizer(model, config.optim)

    notes = [
        describe(ranks, dtype),
        f"model {config.model.size}: {parameters / 1e6:.2f} M parameters, {model.shape}",
        f"data {config.data.source}: {len(data)} packs of {config.data.seq_len} tokens, "
        f"vocabulary {data.vocab_size}; {tokens_per_step(config)} tokens a step",
    ]
    progress = checkpoint.Progress()
    if found is not None:
        progress = checkpoint.load(found, model, optimizer, ranks, config.run.trust_checkpoint)
        notes.append(f"resumed from {found} at step {progress.step}")
        notes += [f"note: {difference}" for difference in differences]
    if ranks.rank == 0:
        notes += checkpoint.clean(run, after=progress.step)
    log = RunLog(run, config.run, ranks, progress.step if found else None)
    for note in notes:
        log.print(note)
    held_out = HeldOut(config, valid, ranks) if valid is not None else None
    try:
        keep = config.run.keep_checkpoints
        with closing(Saver(run, facts, keep, ranks, log.print, progress.step)) as saver:
            loop = Loop(config, ranks, data, held_out, model, optimizer, progress, log, saver)
            stopped = loop.run_all()
    finally:
        log.close()
    if ranks.rank == 0:
        summarise(config, run, log.rows, stopped)
    return 0


def tokens_per_step(config: TrainConfig) -> int:
    return config.data.global_batch_size * config.data.seq_len


class Loop:
    """The training loop over a prepared model; `run_all` is its only entry."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        data: PackedDataset,
        held_out: HeldOut | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: checkpoint.Progress,
        log: RunLog,
        saver: Saver,
    ) -> None:
        self.config, self.ranks = config, ranks
        self.data, self.held_out = data, held_out
        self.model, self.optimizer = model, optimizer
        self.progress, self.log, self.saver = progress, log, saver
        self.checked = False  # contexts are compared across ranks once

    def run_all(self) -> bool:
        """Takes the steps that are left; True if it was asked to stop before the last."""
        last = self.config.run.max_steps
        start = self.progress.step
        if start == 0 and self.held_out:
            nothing = dict.fromkeys(("loss", "grad_norm", "tokens_per_second"))
            self._record(**nothing, lr=0.0, exchange_ms=0.0, evaluate=True)
        batches = micro_batches(self.config, self.data, self.ranks, start)
        stopped = False
        with stop_on_signal() as received:
            while self.progress.step < last and not stopped:
                stopped = self._step(batches, received)
                self.saver.poll()
            self.saver.wait()
            if self.progress.step > self.saver.step:  # also where the periodic one failed
                self.saver.write(self.model, self.optimizer, self.progress)
        return stopped

    def _step(self, batches: Iterator, received: list[int]) -> bool:
        """One step and what is due after it. True if a rank was asked to stop."""
        config, ranks = self.config, self.ranks
        step = self.progress.step + 1
        begin = time.perf_counter()
        batch = next(batches)
        agreed = agree(batch, ranks, stop=bool(received))
        with measure_exchange() as timer:
            check, self.checked = not self.checked, True
            share = forward_backward(self.model, batch, agreed.targets, config, ranks, check)
        loss, norm = reduce_metrics(share, self.model, ranks)
        rate = learning_rate(config.optim, step, config.run.max_steps)
        finite = torch.tensor([loss, norm]).isfinite().all().item()  # equal on all ranks
        if finite:
            update(self.model, self.optimizer, rate, norm, config.optim.clip_norm)
        else:
            self.log.print(f"step {step}: skipped, loss {loss} and gradient norm {norm}")
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        skipped = self.progress.skipped + (not finite)
        self.progress = checkpoint.Progress(step, skipped)

        every = config.run.eval_every
        self._record(
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens_per_second=tokens_per_step(config) / seconds,
            exchange_ms=timer.elapsed_ms(),
            evaluate=bool(every) and (step % every == 0 or step == config.run.max_steps),
        )
        if config.run.checkpoint_every and step % config.run.checkpoint_every == 0:
            self._save()
        return agreed.stop

    def _record(
        self,
        *,
        loss: float | None,
        grad_norm: float | None,
        lr: float,
        tokens_per_second: float | None,
        exchange_ms: float,
        evaluate: bool,
    ) -> None:
        held_out = self.held_out.loss(self.model) if evaluate and self.held_out else None
        exchange_ms, memory = self.ranks.host_max([exchange_ms, peak_memory(self.ranks.device)])
        speed, world = tokens_per_second, self.ranks.world_size
        self.log.write(
            Metrics(
                step=self.progress.step,
                loss=loss,
                eval_loss=held_out,
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_second=speed,
                tokens_per_second_per_gpu=speed / world if speed is not None else None,
                peak_memory_bytes=int(memory),
                exchange_ms=exchange_ms,
                skipped=self.progress.skipped,
            )
        )

    def _save(self) -> None:
        self.saver.start(self.model, self.optimizer, self.progress)


def summarise(config: TrainConfig, run: Path, rows: list[dict], stopped: bool) -> None:
    """Prints how the run ended and draws its plot; for rank 0. rows: those of metrics.jsonl."""
    done = f"{rows[-1]['step'] if rows else 0} of {config.run.max_steps} steps"
    print(f"stopped on request after {done}" if stopped else f"finished: {done}")
    for name, label in (("loss", "train"), ("eval_loss", "held-out")):
        values = [(row["step"], row[name]) for row in rows if row[name] is not None]
        if values:
            (a, first), (b, last) = values[0], values[-1]
            print(f"{label} loss: {first:.4f} (step {a}) -> {last:.4f} (step {b})")
    if rows and rows[-1]["skipped"]:
        print(f"skipped steps: {rows[-1]['skipped']}")
    title = f"{config.model.size} on {config.data.source}, cp {config.parallel.cp}"
    print(plot_losses(run, rows, title))
    print(f"results: {run}/ (metrics.jsonl, config.toml, checkpoints)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
