"""One training step: batches, context, forward and backward, global metrics, update.

The loss of a rank is its share, (sum over its targets) / (targets of the whole global batch), so
that losses and gradients are plain sums over ranks and do not depend on how the batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from einops import rearrange
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from fla_cp import FLACPContext, build_cp_context, zigzag_token_ranges
from fla_cp.train.config import OptimConfig, TrainConfig
from fla_cp.train.data import IGNORE, Batch, PackedDataset, StepBatchSampler, batch_hash, collate
from fla_cp.train.distributed import Ranks
from fla_cp.train.model import CONV_SIZE, parameter_groups
from fla_cp.train.progress import mark
from fla_cp.train.weights import local_tensor


class _GlobalBatches(BatchSampler):
    """A step sampler with the attributes that accelerate needs to cut each batch over ranks."""

    def __init__(self, steps: StepBatchSampler) -> None:
        self.steps = steps
        self.batch_size = steps.global_batch_size
        self.drop_last = True

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.steps)


def micro_batches(
    config: TrainConfig, dataset: PackedDataset, ranks: Ranks, start_step: int
) -> Iterator[list[Batch]]:
    """For each step from `start_step` on, this data-parallel rank's micro-batches, on the host.

    All ranks of a cp group get the same micro-batches.
    """
    batch = config.data.global_batch_size
    size = config.data.micro_batch_size or batch // ranks.dp

    def cut(packs: list[Batch]) -> list[Batch]:
        return [collate(packs[i : i + size]) for i in range(0, len(packs), size)]

    PartialState(cpu=ranks.device.type == "cpu")  # otherwise accelerate chooses a device
    sampler = StepBatchSampler(len(dataset), batch, config.run.seed, start_step)
    loader = DataLoader(dataset, batch_sampler=_GlobalBatches(sampler), collate_fn=cut)
    # Ranks of a cp group count as one process. Dispatched batches would be cut between them.
    return iter(
        prepare_data_loader(
            loader,
            num_processes=ranks.dp,
            process_index=ranks.dp_rank,
            split_batches=True,
            dispatch_batches=False,
        )
    )


@dataclass(frozen=True)
class Agreement:
    """Facts that all ranks share before a step.

    targets: number of targets of the global batch. stop: whether a rank was asked to stop.
    """

    targets: int
    stop: bool


def agree(batches: Sequence[Batch], ranks: Ranks, stop: bool = False) -> Agreement:
    """Counts the global batch's targets and checks that cp peers hold the same batch.

    Uses one host collective of three integers per rank. Raises RuntimeError that names the ranks
    that differ.
    """
    digest = 0
    for batch in batches:
        digest = (digest * 31 + batch_hash(batch)) % 2**63
    targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
    table = ranks.host_gather([digest, targets, stop])
    table = rearrange(table, "(dp cp) facts -> dp cp facts", cp=ranks.cp)
    odd = (table[:, :, :2] != table[:, :1, :2]).any(-1).flatten().nonzero().flatten().tolist()
    if odd:
        raise RuntimeError(
            f"every rank of a cp group must hold the same batch, but ranks {odd} differ from the "
            f"first rank of their group ({ranks.cp} consecutive ranks each)"
        )
    return Agreement(int(table[:, 0, 1].sum()), bool(table[:, :, 2].any()))


def place(
    batch: Batch, config: TrainConfig, ranks: Ranks, check: bool = False
) -> tuple[Tensor, Tensor, FLACPContext]:
    """This rank's tokens and labels [1, T_local] on the device, and their context.

    check: compare the contexts of the cp group (one small collective).
    """
    total = batch["tokens"].shape[1]
    zigzag = config.parallel.layout == "zigzag"
    context = build_cp_context(
        batch["cu_seqlens"].to(ranks.device, non_blocking=True),
        ranks.cp_group,
        conv1d_kernel_size=CONV_SIZE,
        cu_seqlens_cpu=batch["cu_seqlens"],
        token_ranges=zigzag_token_ranges(total, ranks.cp) if zigzag else None,
        exchange=config.parallel.exchange,
        check=check,
    )
    tokens, labels = (context.shard(batch[name], 1) for name in ("tokens", "labels"))
    return (
        tokens.to(ranks.device, non_blocking=True),
        labels.to(ranks.device, non_blocking=True),
        context,
    )


def forward_backward(
    model: nn.Module,
    batches: Sequence[Batch],
    targets: int,
    config: TrainConfig,
    ranks: Ranks,
    check: bool = False,
) -> Tensor:
    """Adds this global batch's gradients to the model's; returns this rank's share of the loss.

    targets: number of targets of the global batch. Gradients are reduced in each micro-batch, so
    that they are accumulated in sharded form. The result is a float32 scalar on the device; its sum
    over ranks is the mean loss in nats per target.
    """
    share = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for batch in batches:
        mark("forward", first=check)
        tokens, labels, context = place(batch, config, ranks, check)
        loss = model(tokens, context, labels) / max(targets, 1)
        mark("backward", first=check)
        loss.backward()
        share += loss.detach()
    return share


def reduce_metrics(share: Tensor, model: nn.Module, ranks: Ranks) -> tuple[float, float]:
    """Global loss and gradient norm, equal on all ranks. The step's only read from the device."""
    mark("sum of losses and gradients")
    grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    square = nn.utils.get_total_norm(grads).double().square()
    # Each of the dp_replicate replicas holds the whole reduced gradient.
    both = ranks.sum(torch.stack([share.double(), square / ranks.dp_replicate]))
    loss, square = both.tolist()
    return loss, math.sqrt(square) if square >= 0 else math.nan


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    assert config.lr is not None, "with_recipe sets it"
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Rate of a step (1 to max_steps): linear warm-up, then cosine down to lr * min_lr_ratio."""
    lr, warmup = config.lr, config.warmup_steps
    assert lr is not None and warmup is not None, "with_recipe sets them"
    if step <= warmup:
        return lr * step / warmup
    done = (step - warmup) / max(1, max_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@torch.no_grad()
def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, grad_norm: float, clip: float
) -> None:
    """Clips the gradients to the global norm `clip` (0: no clipping) and takes one step."""
    if 0 < clip < grad_norm:
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(clip / grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


class HeldOut:
    """The held-out loss, over packs that do not depend on the split.

    packs: the first eval_batches * global_batch_size packs of the valid split, or all there are.
    """

    def __init__(self, config: TrainConfig, dataset: PackedDataset, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.warm = False  # whether an evaluation has run
        batch = config.data.global_batch_size
        self.packs = min(config.data.eval_batches * batch, len(dataset))
        rounds = math.ceil(self.packs / ranks.dp)
        mine = [self._pack(dataset, ranks.dp_rank + i * ranks.dp) for i in range(rounds)]
        size = config.data.micro_batch_size or batch // ranks.dp
        self.batches = [collate(mine[i : i + size]) for i in range(0, rounds, size)]

    def _pack(self, dataset: PackedDataset, index: int) -> Batch:
        if index < self.packs:
            return dataset[index]
        # All ranks run the same number of forwards. A rank without a pack uses one without targets.
        pack = dataset[0]
        return {**pack, "labels": torch.full_like(pack["labels"], IGNORE)}

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Mean loss in nats per target; equal on all ranks. Collective."""
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        first, self.warm = not self.warm, True
        for batch in self.batches:
            mark("evaluation", first=first)
            tokens, labels, context = place(batch, self.config, self.ranks)
            total[0] += model(tokens, context, labels)
            total[1] += (labels != IGNORE).sum()
        model.train()
        loss, targets = self.ranks.sum(total).tolist()
        return loss / max(targets, 1.0)
