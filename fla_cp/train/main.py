"""Trains a language model on one or several ranks, which may share each sequence.

torchrun --nproc-per-node 4 launch/train.py --cp 4
torchrun launch/train.py --cp 4          # launches its four ranks itself
fla-cp-train --config runs/x/config.toml --resume auto
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: this folder is on sys.path instead of the root
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from fla_cp.train.advice import advice
from fla_cp.train.parent import end_with_launcher

if __name__ == "__main__":  # first, because the other imports take seconds
    end_with_launcher()

import torch
from accelerate.utils import set_seed

from fla_cp.comm import measure_exchange
from fla_cp.comm.traced_waits import visible, watch_graphs
from fla_cp.train import checkpoint, divergence
from fla_cp.train.allocator import let_segments_grow
from fla_cp.train.build import build_sharded
from fla_cp.train.cache_limit import GIB
from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.data import Packs
from fla_cp.train.device_rules import check_folder, check_impl
from fla_cp.train.distributed import Ranks, compute_dtype, describe, joined, launch
from fla_cp.train.ending import ended, say
from fla_cp.train.exit_codes import DIVERGED, FAILED, MISTAKE
from fla_cp.train.flops import Meter, peak_of
from fla_cp.train.graphs import graphs_of
from fla_cp.train.host_bound import HostBound
from fla_cp.train.init_from import InitialFolder, why_not_exported
from fla_cp.train.lock import RunLock
from fla_cp.train.metrics import Metrics, RunLog, peak_memory, plot_losses
from fla_cp.train.model import Decoder, has_compiled_blocks, vocabulary
from fla_cp.train.optim import Stepper, build_optimizer, learning_rate
from fla_cp.train.parity import compare, write_report
from fla_cp.train.parse import parse
from fla_cp.train.profile import StepProfile, missed
from fla_cp.train.progress import announced, mark
from fla_cp.train.run_folder import begin_run, open_run
from fla_cp.train.saver import Saver
from fla_cp.train.sources import Reading, build_dataset
from fla_cp.train.step import (
    Feed,
    HeldOut,
    balance_of,
    data_problem,
    document_lengths,
    finish,
    forward_backward,
)
from fla_cp.train.step_times import RankTimes, StepTimes, slowest
from fla_cp.train.text_files import Split
from fla_cp.train.token_layout import whole_packs
from fla_cp.train.trackers import check_installed, start_trackers


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags and trains; returns the exit code, see fla_cp/train/exit_codes.py."""
    if argv is None:  # this process was started for the training
        end_with_launcher()
        let_segments_grow()
    argv = list(sys.argv[1:] if argv is None else argv)
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(argv, quiet=not first)
        code = launch(config.parallel, argv)
        if code is None:
            with joined(config.parallel) as ranks, RunLock() as lock:
                task = check_parity if config.parity.check else train
                code = task(config, ranks, lock)
    except UserError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        code = MISTAKE
    return code


def check_parity(config: TrainConfig, ranks: Ranks, lock: RunLock) -> int:
    """Runs --check-parity; returns 0 if the split agrees with one rank, else FAILED."""
    check_impl(config, ranks)
    dataset = load_data(config, "train", ranks)
    run = open_run(config, ranks, lock).path
    check_folder(config, dataset.vocab_size, ranks.device, weights=True)
    begin_run(config, run, ranks, lock)
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    if ranks.rank == 0:
        say(f"{describe(ranks, dtype)}; comparing {config.parity.steps} steps with one rank")
        if whole_packs(config):
            say(
                "note: each rank holds whole packs, so no state crosses ranks and the comparison "
                "says nothing about the exchange; --micro-batch-size 1 shards each pack"
            )
    report = compare(config, dataset, ranks)
    failed = 0.0
    if report is not None:
        say(report.table())
        say(f"report: {write_report(report, run)}")
        failed = float(not report.passed)
    return FAILED if ranks.host_max([failed])[0] else 0


NOT_HELD_OUT = "; --eval-every 0 reads no held-out data"
"""The end of a message about a mistake in the held-out data."""


@announced("data")
def load_data(config: TrainConfig, split: Split, ranks: Ranks) -> Packs:
    """The packs of one split. Raises UserError, on all ranks, if one of them cannot read them.

    To be called before the run folder is made, so that a mistake leaves no folder. Collective.
    """
    dataset, problem = None, ""
    data = config.data
    limit = round(data.cache_gib * GIB)
    reading = Reading(data.tokenizer, data.column, data.cache, limit)
    try:
        dataset = build_dataset(data.source, data.seq_len, split, config.run.seed, reading)
    except (ValueError, OSError) as error:
        problem = str(error) if split == "train" else f"{error}{NOT_HELD_OUT}"
    problems = ranks.gather(problem)
    for rank, text in enumerate(problems):
        if text:
            everywhere = len(set(problems)) == 1
            flag = "" if text.startswith("--") else "--data: "  # or that of --tokenizer
            raise UserError(f"{flag}{text}" + ("" if everywhere else f" (on rank {rank})"))
    assert dataset is not None
    return dataset


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in the block; there they do not end the process."""
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(s, lambda number, _: received.append(number)) for s in signals]
    try:
        yield received
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def train(config: TrainConfig, ranks: Ranks, lock: RunLock) -> int:
    """Trains to --max-steps or until a signal asks it to stop; writes the run folder."""
    check_impl(config, ranks)
    check_installed(config.run.trackers, ranks)
    data = load_data(config, "train", ranks)
    valid = load_data(config, "valid", ranks) if config.run.eval_every else None
    folder = open_run(config, ranks, lock)
    run, found = folder.path, folder.found
    set_seed(config.run.seed)
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    vocab_size = vocabulary(config.model, data.vocab_size)
    facts = checkpoint.facts(config, vocab_size, data.extent, dtype)
    differences = checkpoint.check_matches(found, facts) if found is not None else []
    check_folder(config, data.vocab_size, ranks.device, weights=found is None)
    if line := folder.ends(config.run.steps):
        if ranks.rank == 0:
            say(line)
        return 0
    source, initial = config.run.init_from, None
    if source is not None and found is None:
        initial = InitialFolder(source, config.model, vocab_size, ranks)
    begin_run(config, run, ranks, lock)
    filled = found is not None or initial is not None  # by a checkpoint, or from the folder
    seed = None if filled else config.run.seed
    free = config.data.max_documents is None  # no compiled graph takes a fixed context
    model = build_sharded(config.model, vocab_size, seed, ranks, dtype, compiled=free)
    parameters = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    if isinstance(model, Decoder) and model.balance is not None:
        parameters += f" ({model.active_parameters() / 1e6:.2f} M of them for a token)"
    optimizer = build_optimizer(model, config.optim)

    notes = [
        describe(ranks, dtype),
        f"model {config.model.name}: {parameters}, {model.shape}",
        f"data {config.data.source}: {described(data)} of {config.data.seq_len} tokens, "
        f"vocabulary {data.vocab_size}; {tokens_per_step(config)} tokens a step",
        *data.notes,
        *(valid.notes if valid is not None else ()),
        *advice(config),
    ]
    if folder.note:
        notes.append(folder.note)
    own = found is None and config.model.folder is None
    if own and (reason := why_not_exported(config.model, vocab_size)):
        notes.append(f"note: fla-cp-export cannot write this model for transformers: {reason}")
    if initial is not None:
        assert isinstance(model, Decoder)  # --init-from is refused beside hf:DIR
        initial.fill(model)
        notes.append(f"weights from {source}")
        notes += [f"note: {difference}" for difference in initial.notes]
    progress = checkpoint.Progress()
    if found is not None:
        progress = checkpoint.load(found, model, optimizer, ranks, config.run.trust_checkpoint)
        notes.append(f"resumed from {found} at step {progress.step}; the run goes on in {run}")
        notes += [f"note: {difference}" for difference in differences]
    notes += missed(config.run.profiled, progress.step)
    trackers = start_trackers(config, run, ranks, progress.step)
    if ranks.rank == 0:
        notes += checkpoint.clean(run, after=progress.step)
    log = RunLog(run, config.run, ranks, progress.step if found else None, trackers)
    for note in notes:
        log.print(note)
    diverged, stopped = "", False
    try:
        held_out = read_held_out(config, valid, ranks) if valid is not None else None
        keep = config.run.keep_checkpoints
        with (
            closing(Saver(run, facts, keep, ranks, log.print, progress.step)) as saver,
            StepProfile(run, config.run.profiled, ranks, log.print) as profile,
        ):
            loop = Loop(config, ranks, data, held_out, model, optimizer, progress, log, saver)
            stopped = loop.run_all(profile)
    except divergence.Diverged as error:
        diverged = str(error)
    finally:
        log.close()
    if ranks.rank == 0 and diverged:
        kept = checkpoint.checkpoints(run)
        last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint"
        print(f"error: {diverged}; {last}", file=sys.stderr, flush=True)
    elif ranks.rank == 0:
        summarise(config, run, log, stopped)
    return DIVERGED if diverged else 0


@announced("held-out data")
def read_held_out(config: TrainConfig, valid: Packs, ranks: Ranks) -> HeldOut:
    """The packs of the evaluations, tokenised if need be. Raises UserError, on all ranks, if one of
    them cannot read them. Collective."""
    found, problem = None, ""
    try:
        packs = valid.head(config.data.eval_batches * config.data.global_batch_size)
        found = HeldOut(config, packs, ranks)
    except ValueError as error:
        problem = f"{data_problem(error)}{NOT_HELD_OUT}"
    problem = ranks.first_problem(problem)
    if found is None or problem:
        raise UserError(problem)
    return found


def described(data: Packs) -> str:
    """How much a data set has, in words that end in "packs"."""
    return f"{data.extent} packs" if isinstance(data.extent, int) else f"{data.extent} in packs"


def tokens_per_step(config: TrainConfig) -> int:
    return config.data.global_batch_size * config.data.seq_len


class Loop:
    """The training loop over a prepared model; `run_all` is its only entry."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        data: Packs,
        held_out: HeldOut | None,
        model: torch.nn.Module,
        optimizer: Stepper,
        progress: checkpoint.Progress,
        log: RunLog,
        saver: Saver,
    ) -> None:
        self.config, self.ranks = config, ranks
        self.data, self.held_out = data, held_out
        self.model, self.optimizer = model, optimizer
        self.progress, self.log, self.saver = progress, log, saver
        self.graphs = graphs_of(model, config, ranks)
        self.skips = divergence.Skips(config.run.max_skips)
        self.host_bound = HostBound(config, ranks)
        self.checked = False  # whether the ranks have compared their contexts
        dtype = compute_dtype(config.parallel.dtype, ranks.device)
        self.meter = Meter(model, ranks.world_size, peak_of(ranks.device, dtype))

    def run_all(self, profile: StepProfile) -> bool:
        """Takes the remaining steps; returns True if a signal asked it to stop before the last one.

        Raises Diverged, on all ranks, if the last steps were skipped. If it is asked to stop while
        steps are skipped, it saves the weights, which are those before the skipped steps, and
        deletes no older checkpoint for it.
        """
        last = self.config.run.steps
        start = self.progress.step
        stopped = False
        first = self.progress.tokens // self.config.data.seq_len  # after everything that was read
        # Its workers start to read while the first evaluation runs.
        with Feed(self.config, self.data, self.ranks, start, first) as feed:
            if start == 0 and self.held_out:
                nothing = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "mfu", "times"))
                self._record(**nothing, lr=0.0, evaluate=True)
            with stop_on_signal() as received:
                while self.progress.step < last and not stopped:
                    with profile.step(self.progress.step + 1):
                        stopped = self._step(feed, received)
                    self.saver.poll()
                with announced("checkpoint"):
                    self.saver.wait()
                if self.skips.count and not stopped:
                    raise divergence.Diverged(f"the last steps are missing: {self.skips.report()}")
                if self.skips.count:
                    self.saver.keep += 1
                # true as well if the periodic checkpoint of this step failed
                if self.progress.step > self.saver.step:
                    divergence.check_weights(self.model, self.ranks, self.progress.step)
                    with announced("checkpoint"):
                        self.saver.write(self.model, self.optimizer, self.progress)
        return stopped

    def _step(self, feed: Feed, received: list[int]) -> bool:
        """Takes one step, with its evaluation and checkpoint. True if a rank was asked to stop.

        The host waits for the device once, in `finish`; before, it fetches the next batch.
        An evaluation, a checkpoint and a skipped step read from the device once more each.
        """
        config, ranks = self.config, self.ranks
        step = self.progress.step + 1
        begin, times = time.perf_counter(), StepTimes(ranks.device)
        mark("data", step=step, first=not self.checked)  # workers may still be starting
        batch = feed.take()
        agreed = feed.agreement(batch, bool(received), times)
        with measure_exchange() as timer, watch_graphs():
            check, self.checked = not self.checked, True
            given = self.model, batch, agreed.targets, config, ranks, check, self.graphs
            share = forward_backward(*given)
        stop = agreed.stop
        if step < config.run.steps and not stop:
            stop = feed.read_ahead(bool(received), times)
        rate = learning_rate(config.optim, step, config.run.steps)
        mine = self.model, self.optimizer
        loss, norm, finite = finish(share, *mine, rate, config, ranks, check, times)
        if finite:
            self.skips.end()
        else:
            self.log.print(self.skips.add(step, loss, norm, self.model, ranks))
        if self.graphs is None:
            self.optimizer.zero_grad()
        else:
            self.graphs.reset_gradients()
        seconds = time.perf_counter() - begin
        skipped = self.progress.skipped + (not finite)
        packs = self.progress.packs + config.data.global_batch_size
        tokens = self.progress.tokens + tokens_per_step(config)
        self.progress = checkpoint.Progress(step, skipped, packs, tokens)

        every = config.run.eval_every
        self._record(
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens_per_second=tokens_per_step(config) / seconds,
            mfu=self.meter.share(tokens_per_step(config), document_lengths(batch), seconds),
            times=times.read(timer, self._memory()),  # events have passed: `finish` has waited
            evaluate=bool(every) and (step % every == 0 or step == config.run.max_steps),
        )
        if self.log.main:
            row = self.log.rows[-1]
            note = self.host_bound.note(batch, row["host_ms"], row["device_ms"], self.captured)
            if note is not None:
                self.log.print(note)
        self.skips.check()
        every = config.run.checkpoint_every
        if every and step % every == 0 and self._may_save():
            self._save()
        return stop

    def _may_save(self) -> bool:
        """Whether a checkpoint may be written: not after a skipped step.

        Raises Diverged if a weight is not finite.
        """
        if self.skips.count:
            self.log.print(f"no checkpoint at step {self.progress.step}: {self.skips}")
            return False
        divergence.check_weights(self.model, self.ranks, self.progress.step)
        return True

    def _record(
        self,
        *,
        loss: float | None,
        grad_norm: float | None,
        lr: float,
        tokens_per_second: float | None,
        mfu: float | None,
        times: RankTimes | None,
        evaluate: bool,
    ) -> None:
        """Writes the metrics. times: of this rank; None before the first step."""
        held_out = self.held_out.loss(self.model) if evaluate and self.held_out else None
        mark("metrics")
        # The memory of an evaluation counts as well.
        mine = (times or RankTimes(*[0.0] * len(RankTimes._fields)))._replace(memory=self._memory())
        every = [RankTimes(*row) for row in self.ranks.host_rows(mine)]
        worst = RankTimes(*map(max, zip(*every, strict=True)))
        speed, world = tokens_per_second, self.ranks.world_size
        balance = balance_of(self.model)
        self.log.write(
            Metrics(
                step=self.progress.step,
                loss=loss,
                eval_loss=held_out,
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_second=speed,
                tokens_per_second_per_gpu=speed / world if speed is not None else None,
                peak_memory_bytes=int(worst.memory),
                exchange_ms=worst.exchange if self.sees_exchanges else None,
                skipped=self.progress.skipped,
                expert_load=balance.load if balance is not None else None,
                mfu=mfu,
                tokens=self.progress.tokens,
                **({} if times is None else self._shown(every, worst)),
            )
        )

    def _shown(self, every: list[RankTimes], worst: RankTimes) -> dict[str, Any]:
        """The metrics of a step's time, from the times of all ranks and the longest of them."""
        rank, waited = slowest(every) if len(every) > 1 else (None, None)
        return {
            "exchange_under_way_ms": worst.under_way if self.sees_exchanges else None,
            "slowest_rank": rank,
            "wait_ms": waited,
            "host_ms": worst.host,
            "device_ms": worst.device if self.ranks.device.type == "cuda" else None,
        }

    @property
    def sees_exchanges(self) -> bool:
        """Whether waits for exchanges are measured in all CUDA graphs and compiled blocks."""
        graphs = self.graphs is not None and self.graphs.hides_waits
        hidden = has_compiled_blocks(self.model) and not visible()
        return self.config.parallel.cp == 1 or not (graphs or hidden)

    @property
    def captured(self) -> bool:
        """Whether there is a CUDA graph of a micro-batch."""
        return self.graphs is not None and bool(self.graphs.graphs)

    def _memory(self) -> float:
        return float(peak_memory(self.ranks.device, graphs=self.captured))

    @announced("checkpoint")
    def _save(self) -> None:
        self.saver.start(self.model, self.optimizer, self.progress)


@announced("summary")
def summarise(config: TrainConfig, run: Path, log: RunLog, stopped: bool) -> None:
    """Prints how the run ended and draws its plot; on rank 0."""
    rows = log.rows
    done = f"{rows[-1]['step'] if rows else 0} of {config.run.max_steps} steps"
    log.print(f"stopped on request after {done}" if stopped else f"finished: {done}")
    for name, label in (("loss", "train"), ("eval_loss", "held-out")):
        values = [(row["step"], row[name]) for row in rows if row[name] is not None]
        if values:
            (a, first), (b, last) = values[0], values[-1]
            log.print(f"{label} loss: {first:.4f} (step {a}) -> {last:.4f} (step {b})")
    if rows and rows[-1]["skipped"]:
        log.print(f"skipped steps: {rows[-1]['skipped']}")
    title = f"{config.model.name} on {config.data.source}, cp {config.parallel.cp}"
    log.print(plot_losses(run, rows, title))
    log.print(f"results: {run}/ (metrics.jsonl, config.toml, checkpoints)")


if __name__ == "__main__":
    sys.exit(ended(main()))
