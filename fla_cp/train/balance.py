"""The loads of a decoder's experts over a step, and what the trainer does to even them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_cp.comm import collectives
from fla_cp.nn import Router, RoutingStatistics, load_balancing_loss
from fla_cp.train.config import ModelConfig, TrainConfig, UserError
from fla_cp.train.data import IGNORE

AUX_LOSS = 0.001
"""Factor of the load-balancing loss with softmax, as in Qwen3."""

BIAS_RATE = 0.001
"""Step of the correction bias with sigmoid, as in DeepSeek-V3."""


def rates(config: ModelConfig, routing: str) -> dict[str, float]:
    """`aux_loss` and `bias_rate` of a `Balance`: as configured, else by the kind of routing."""
    aux_loss, bias_rate = (AUX_LOSS, 0.0) if routing == "softmax" else (0.0, BIAS_RATE)
    if config.aux_loss is not None:
        aux_loss = config.aux_loss
    if config.bias_rate is not None:
        bias_rate = config.bias_rate
    return {"aux_loss": aux_loss, "bias_rate": bias_rate}


def check_micro_batches(config: TrainConfig, aux_loss: float, origin: str) -> None:
    """Raises UserError if --check-parity would compare load-balancing losses of different batches.

    One rank takes the micro-batches of data-parallel ranks one after the other, each with a loss of
    its own. The ranks together have one loss for all of them, which is not the mean of these.
    aux_loss: factor of the loss. origin: what sets this factor, for the message.
    """
    size = config.data.micro_batch_size
    if config.parity.check and aux_loss and config.parallel.dp > 1 and size:
        raise UserError(
            "--micro-batch-size must be left out with --check-parity, data parallelism and "
            f"{origin}, whose loads are those of the micro-batches of all ranks, got {size}"
        )


class Balance(nn.Module):
    """Counts the tokens of each expert over the micro-batches of a step.

    layers: how many blocks have experts. counts: [layers, experts] int64 on the device, of this
    rank, and of all ranks once `reduce_metrics` has summed them. A CUDA graph adds to them where
    they are. group: the ranks of the run; None: one rank. load: after `reduce_metrics`, the
    largest number of tokens of an expert over the mean of its layer, for the worst layer.
    aux_loss: factor of the load-balancing loss; bias_rate: step of the correction biases; 0: none.
    """

    counts: Tensor

    def __init__(
        self,
        layers: int,
        experts: int,
        experts_per_token: int,
        *,
        aux_loss: float,
        bias_rate: float,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.aux_loss, self.bias_rate = aux_loss, bias_rate
        device = torch.get_default_device()  # meta, while a sharded model is made
        counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self.register_buffer("counts", counts, persistent=False)
        self.group: dist.ProcessGroup | None = None
        self.load: float | None = None

    def counted(
        self, loss: Tensor, statistics: Sequence[RoutingStatistics], labels: Tensor
    ) -> Tensor:
        """Counts a micro-batch; returns the loss, with the gradient of the balancing loss as well.

        loss: summed over this rank's targets. labels: their tokens, -100 for none. The balancing
        loss is the mean over layers, over the tokens of this micro-batch on all ranks. It counts
        once for each target, so that the step's division by all targets fits both. Collective if
        there is a balancing loss.
        """
        found = RoutingStatistics(*(torch.stack(part) for part in zip(*statistics, strict=True)))
        self.counts += found.counts
        if not self.aux_loss:
            return loss
        share = load_balancing_loss(found, self.experts_per_token, self.group).mean()
        targets = (labels != IGNORE).sum()
        if self.group is not None:
            targets = collectives.all_reduce(targets, self.group)
        share = self.aux_loss * targets * share
        return loss + (share - share.detach())

    def largest(self, counts: Tensor) -> Tensor:
        """Keeps the counts of all ranks; returns the worst layer's `load`, on the device."""
        self.counts.copy_(counts)
        return (counts.amax(-1) / counts.mean(-1)).amax()

    def move_biases(self, routers: Sequence[Router]) -> None:
        """Moves each router's bias by the step's counts of all ranks."""
        if self.bias_rate:
            for router, counts in zip(routers, self.counts, strict=True):
                router.move_bias(counts, self.bias_rate)
