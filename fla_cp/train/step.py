"""One training step: batches, context, forward and backward, and global metrics. The update is in
optim.py.

The loss of a rank is its share, (sum over its targets) / (targets of the whole global batch).
Losses and gradients are therefore plain sums over ranks, and do not depend on how the batch is
split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fla_cp import FLACPContext, build_cp_context
from fla_cp.train.balance import Balance
from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.data import IGNORE, Batch, PackList, Packs
from fla_cp.train.distributed import Ranks
from fla_cp.train.graphs import Graphs
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.loader import Share, Sharing, StepLoader, token_ranges
from fla_cp.train.loss import backward
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.optim import Stepper, update, update_ahead
from fla_cp.train.progress import mark
from fla_cp.train.step_times import StepTimes
from fla_cp.train.token_layout import layout_of
from fla_cp.train.weights import local_tensor


@dataclass
class MicroBatch:
    """The part of a step's batch that one forward and backward takes.

    share: this rank's part of it, on the host. ahead: tokens, labels and context on the device, if
    `Feed` has placed them already.
    """

    share: Share
    ahead: Placed | None = None

    def placed(self, config: TrainConfig, ranks: Ranks, check: bool = False) -> Placed:
        """Tokens, labels and context, see `place`."""
        if self.ahead is None:
            return place(self.share, config, ranks, check)
        assert not check, "contexts are compared before any is placed ahead"
        return self.ahead


class Feed:
    """The micro-batches of each step from `start_step` on, for this data-parallel rank.

    All ranks of a cp group get parts of the same batches. On CUDA, `read_ahead` copies the next
    step's batch to the GPU on a stream of its own, while the present step runs. first_pack: see
    `Packs.sampler`. workers: how many processes read; None: as configured. At its end, the context
    manager ends them.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Packs,
        ranks: Ranks,
        start_step: int,
        first_pack: int | None = None,
        workers: int | None = None,
    ) -> None:
        self.config, self.ranks = config, ranks
        cuda = ranks.device.type == "cuda"
        if workers is None:
            workers = config.data.workers
        batch = config.data.global_batch_size
        self.loader = StepLoader(
            dataset,
            dataset.sampler(batch, config.run.seed, start_step, first_pack),
            sharing(config, ranks),
            dp=ranks.dp,
            dp_rank=ranks.dp_rank,
            workers=(2 if cuda else 0) if workers is None else workers,
            pinned=cuda,
        )
        self.stream = torch.cuda.Stream(ranks.device) if cuda else None
        self.next: list[MicroBatch] | None = None
        self.agreed: Agreement | None = None  # about `next`
        self.problem = ""  # why the last batch could not be read

    def __enter__(self) -> Feed:
        self.loader.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.next = None
        self.loader.__exit__(kind, error, at)

    def take(self) -> list[MicroBatch]:
        """The next step's micro-batches. The caller keeps them until the step's losses have been
        read, because their memory on the GPU may be used for the next batch once they are dropped.
        If this rank cannot read its data, there are none, and `agreement` raises on all ranks.
        """
        batches, self.next = self.next, None
        if batches is None:
            return self._read()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return batches

    def agreement(
        self, batches: Sequence[MicroBatch], stop: bool = False, times: StepTimes | None = None
    ) -> Agreement:
        """What the ranks agree on about the batches that `take` has returned. stop: whether this
        rank was asked to stop. times: measures the wait for other ranks. Raises UserError, on all
        ranks, if one of them could not read its data."""
        found, self.agreed = self.agreed, None
        if found is None:
            with nullcontext() if times is None else times.waiting(on_host=True):
                found = agree(batches, self.ranks, stop, self.problem)
        return found

    def read_ahead(self, stop: bool = False, times: StepTimes | None = None) -> bool:
        """Takes the next step's batch from the workers, places it, and agrees on it with the other
        ranks, so that the next step can begin at once. Call it while a step runs.

        stop, times: as of `agreement`. Returns whether any rank was asked to stop.
        """
        mark("data of the next step")
        batches = self._read()
        # stream(None) changes nothing
        with torch.cuda.stream(self.stream):
            for batch in batches:
                batch.ahead = place(batch.share, self.config, self.ranks)
        self.next, self.agreed = batches, self.agreement(batches, stop, times)
        return self.agreed.stop

    def _read(self) -> list[MicroBatch]:
        try:
            return [MicroBatch(share) for share in next(self.loader)]
        except ValueError as error:
            self.problem = data_problem(error)
            return []


def data_problem(error: ValueError) -> str:
    """The flag, and what is wrong with the data, in one line. error: of a data set, perhaps in a
    worker, whose traceback then comes before its message. Raises the error itself if the file
    system is its cause, because a restart may find that the file can be read again."""
    if isinstance(error.__cause__, OSError) or "[Errno " in str(error):
        raise error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[-1].removeprefix("ValueError: ") if "Traceback" in str(error) else lines[0]
    return text if text.startswith("--") else f"--data: {text}"


def sharing(config: TrainConfig, ranks: Ranks) -> Sharing:
    """How this rank makes its micro-batches from packs."""
    data = config.data
    size = data.micro_batch_size or data.global_batch_size // ranks.dp
    return Sharing(size, ranks.cp, ranks.rank % ranks.cp, layout_of(config))


def document_lengths(batches: Sequence[MicroBatch]) -> list[int]:
    """Tokens of each document of these micro-batches, on all cp ranks together."""
    lengths: list[int] = []
    for batch in batches:
        lengths += batch.share.cu_seqlens.diff().tolist()
    return lengths


@dataclass(frozen=True)
class Agreement:
    """What all ranks agree on before a step.

    targets: how many targets the global batch has. stop: whether any rank was asked to stop.
    """

    targets: int
    stop: bool


def agree(
    batches: Sequence[MicroBatch], ranks: Ranks, stop: bool = False, problem: str = ""
) -> Agreement:
    """Counts the global batch's targets and checks that cp peers hold the same batch.

    problem: why this rank could not read its data, or "". It is one collective on the host, of four
    integers from each rank. Raises RuntimeError, which names the ranks that differ, and UserError
    if a rank has a problem.
    """
    digest = 0
    for batch in batches:
        digest = (digest * 31 + batch.share.digest) % 2**63
    targets = sum(batch.share.targets for batch in batches)
    table = ranks.host_gather([digest, targets, stop, bool(problem)]).numpy()
    if table[:, 3].any():
        raise UserError(ranks.first_problem(problem))
    table = rearrange(table, "(dp cp) facts -> dp cp facts", cp=ranks.cp)
    odd = (table[:, :, :2] != table[:, :1, :2]).any(-1).flatten().nonzero()[0].tolist()
    if odd:
        raise RuntimeError(
            f"every rank of a cp group must hold the same batch, but ranks {odd} differ from the "
            f"first rank of their group ({ranks.cp} consecutive ranks each)"
        )
    return Agreement(int(table[:, 0, 1].sum()), bool(table[:, :, 2].any()))


Placed = tuple[Tensor, Tensor, FLACPContext]


def place(share: Share, config: TrainConfig, ranks: Ranks, check: bool = False) -> Placed:
    """This rank's tokens and labels [1, T_local] on the device, and their context.

    The host does not wait for copies from pinned memory. check: compare the contexts of the cp
    group, in one small collective.
    """
    context = build_cp_context(
        share.cu_seqlens.to(ranks.device, non_blocking=True),
        ranks.cp_group,
        conv1d_kernel_size=CONV_SIZE,
        cu_seqlens_cpu=share.cu_seqlens,
        token_ranges=token_ranges(share.total, ranks.cp, layout_of(config)),
        exchange=config.parallel.exchange,
        check=check,
    )
    return (
        share.tokens.to(ranks.device, non_blocking=True),
        share.labels.to(ranks.device, non_blocking=True),
        context,
    )


def forward_backward(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    targets: int,
    config: TrainConfig,
    ranks: Ranks,
    check: bool = False,
    graphs: Graphs | None = None,
) -> Tensor:
    """Adds the gradients of the global batch to the model's. Returns this rank's share of the loss,
    a float32 scalar on the device; the sum over ranks is the mean loss in nats per target.

    targets: how many targets the global batch has. check: compare the contexts of the cp group.
    graphs: CUDA graphs that run the micro-batches. Gradients are reduced over the ranks after the
    last micro-batch or after each, see `ParallelConfig.reduce`.
    """
    share = torch.zeros((), dtype=torch.float32, device=ranks.device)
    balance = balance_of(model)
    if balance is not None:
        balance.counts.zero_()
    for i, batch in enumerate(batches):
        last = i + 1 == len(batches)
        if isinstance(model, FSDPModule) and config.parallel.reduce == "step":
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        mark("forward", first=check)
        tokens, labels, context = batch.placed(config, ranks, check)
        if graphs is not None and not check:
            share += graphs.loss(tokens, labels, context, 1 / max(targets, 1))
            continue
        loss = model(tokens, context, labels) / max(targets, 1)
        mark("backward", first=check)
        backward(loss)
        share += loss.detach()
    return share


class Sums:
    """The global loss and gradient norm, which are being copied to the host. They are equal on all
    ranks.

    values: fp64 on the device: the loss, the square of the norm and, with experts, the largest load
    of an expert.
    """

    def __init__(self, values: Tensor, balance: Balance | None) -> None:
        self.values, self.balance = values, balance
        self.copied: torch.cuda.Event | None = None
        self.host = values
        if values.is_cuda:
            empty = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self.host = empty.copy_(values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    @property
    def norm(self) -> Tensor:
        """The gradient norm, on the device."""
        return self.values[1].sqrt()

    @property
    def finite(self) -> Tensor:
        """Whether loss and norm are finite, on the device."""
        return torch.isfinite(self.values[0]) & torch.isfinite(self.norm)

    def read(self) -> tuple[float, float]:
        """Loss and norm. The host waits for the work that leads to them, and not for work that was
        queued later. Also sets `load` of the model's `Balance`."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, square, *load = self.host.tolist()
        if self.balance is not None:
            (self.balance.load,) = load
        return loss, math.sqrt(square) if square >= 0 else math.nan


def reduce_metrics(share: Tensor, model: nn.Module, ranks: Ranks) -> tuple[float, float]:
    """The global loss and gradient norm, equal on all ranks. This is the step's only wait of the
    host for the device, after which all work of the forward and backward is done.
    """
    return queue_sums(share, model, ranks).read()


def queue_sums(
    share: Tensor, model: nn.Module, ranks: Ranks, times: StepTimes | None = None
) -> Sums:
    """Queues the sums over ranks of the loss, of the gradients' squares and of the loads of
    experts. times: measures the wait for other ranks, and notes that the work of the step has been
    issued."""
    mark("sum of losses and gradients")
    grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    square = nn.utils.get_total_norm(grads).double().square()
    # Each of the dp_replicate replicas holds the whole reduced gradient.
    parts = torch.stack([share.double(), square / ranks.dp_replicate])
    balance = balance_of(model)
    if balance is not None:
        parts = torch.cat([parts, balance.counts.flatten().double()])
    with nullcontext() if times is None else times.waiting():
        parts = ranks.sum(parts)
    if times is not None:
        times.issued()
    if balance is None:
        return Sums(parts, None)
    load = balance.largest(parts[2:].view_as(balance.counts))
    return Sums(torch.cat([parts[:2], load[None]]), balance)


def finish(
    share: Tensor,
    model: nn.Module,
    optimizer: Stepper,
    lr: float,
    config: TrainConfig,
    ranks: Ranks,
    check: bool = False,
    times: StepTimes | None = None,
) -> tuple[float, float, bool]:
    """Takes the optimiser's step, unless the loss or the gradient norm is not finite.

    share: from `forward_backward`. times: see `queue_sums`. Returns the global loss and norm, and
    whether they are finite.
    The host waits for the device once, to read them. An optimiser that supports it (`update_ahead`)
    works during this wait.
    """
    sums, clip = queue_sums(share, model, ranks, times), config.optim.clip_norm
    ahead = update_ahead(optimizer, lr, sums.norm, sums.finite, clip)
    loss, norm = sums.read()
    mark("update", first=check)
    finite = math.isfinite(loss) and math.isfinite(norm)  # the same on all ranks
    if finite and not ahead:
        update(model, optimizer, lr, norm, clip)
    elif finite and isinstance(model, LanguageModel):
        model.move_biases()
    return loss, norm, finite


def balance_of(model: nn.Module) -> Balance | None:
    """The `Balance` that counts the loads of the model's experts; None if it has none."""
    return model.balance if isinstance(model, LanguageModel) else None


class HeldOut:
    """The held-out loss, over packs that do not depend on how the ranks split the work.

    dataset: packs of the valid split, of which at most eval_batches * global_batch_size are read.
    """

    def __init__(self, config: TrainConfig, dataset: PackList, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.warm = False  # whether an evaluation has run
        batch = config.data.global_batch_size
        self.packs = min(config.data.eval_batches * batch, len(dataset))
        rounds = math.ceil(self.packs / ranks.dp)
        mine = [self._pack(dataset, ranks.dp_rank + i * ranks.dp) for i in range(rounds)]
        shares = sharing(config, ranks)(mine)
        cuda = ranks.device.type == "cuda"
        self.batches = [share.pinned() if cuda else share for share in shares]

    def _pack(self, dataset: PackList, index: int) -> Batch:
        if index < self.packs:
            return dataset[index]
        # All ranks run the same number of forwards. A rank without a pack uses one without targets.
        pack = dataset[0]
        return {**pack, "labels": torch.full_like(pack["labels"], IGNORE)}

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """The mean loss in nats per target, equal on all ranks. Collective."""
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        first, self.warm = not self.warm, True
        for batch in self.batches:
            mark("evaluation", first=first)
            tokens, labels, context = place(batch, self.config, self.ranks)
            total[0] += model(tokens, context, labels)
            total[1] += (labels != IGNORE).sum()
        model.train()
        # No backward follows, so FSDP's groups would stay gathered: model.parameters() would lack
        # their shards, and a CUDA graph's updates would never reach the next forward.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        loss, targets = self.ranks.sum(total).tolist()
        return loss / max(targets, 1.0)
