"""Decides which experts a token goes to and with which weights, and keeps experts equally loaded.

Two ways are common. Qwen3 and Switch Transformer (arXiv 2101.03961, sec. 2.2) have scores by
softmax, and a loss that grows with the imbalance. DeepSeek-V3 (arXiv 2412.19437, sec. 2.1.2) and
Kimi Linear have scores by sigmoid, and a bias that is added only for the choice. The bias follows
the loads, without a gradient.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fla_cp.arguments import check_choice, check_count, check_flags, check_number
from fla_cp.comm import collectives
from fla_cp.nn.initial import Initial, InitializedModule, Normal
from fla_cp.replay import without_autocast
from fla_cp.rule import accumulator

ROUTER_STD = 0.02
SUM_FLOOR = 1e-20
"""Added to the sum of the chosen scores, as in DeepSeek-V3, because all sigmoids may be 0."""


class Routing(NamedTuple):
    """The experts of N tokens.

    experts: [N, k] int64, best first. weights: [N, k], those of the chosen experts. probabilities:
    [N, E], the scores divided by their sum. Weights and probabilities are fp32 (fp64 for fp64
    tokens).
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class RoutingStatistics(NamedTuple):
    """A layer's routing, summed over the tokens of a call on this rank.

    counts: [E] int64, how many tokens chose each expert. probabilities: [E], the sums of the
    tokens' probabilities, with a gradient.
    """

    counts: Tensor
    probabilities: Tensor


class Router(InitializedModule):
    """Chooses `experts_per_token` of `num_experts` by scores of x W^T, computed in fp32 (fp64).

    routing: "softmax" or "sigmoid". With "sigmoid" there is the buffer correction_bias [E], which
    is added to the scores only for the choice. It stays in fp32 if the module is converted to bf16
    or fp16, in which the small steps of `move_bias` would be lost. normalize: divide the weights of
    a token by their sum. scale: factor on the weights. num_groups, top_groups: experts form
    num_groups groups of neighbours, and are chosen only from the `top_groups` groups whose two best
    scores have the largest sums. Among equal scores the expert with the lowest number is chosen.
    Raises ValueError for counts that do not fit each other, and unless scale is a finite number
    above 0.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        routing: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
    ) -> None:
        super().__init__()
        counts = {"hidden_size": hidden_size, "num_experts": num_experts}
        counts |= {"experts_per_token": experts_per_token}
        for name, value in {**counts, "num_groups": num_groups, "top_groups": top_groups}.items():
            check_count(name, value)
        check_choice("routing", routing, ("softmax", "sigmoid"))
        check_flags(("normalize",), (normalize,))
        check_number("scale", scale, 0)
        if num_experts % num_groups:
            raise ValueError(
                "num_experts must be a multiple of num_groups, "
                f"got num_experts={num_experts}, num_groups={num_groups}"
            )
        if top_groups > num_groups:
            raise ValueError(
                f"top_groups must be at most num_groups={num_groups}, got {top_groups}"
            )
        most = num_experts // num_groups * top_groups
        if experts_per_token > most:
            raise ValueError(
                f"experts_per_token must be at most the {most} experts that may be chosen, "
                f"got {experts_per_token}"
            )
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.routing, self.normalize, self.scale = routing, normalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if routing == "sigmoid" else None
        self.register_buffer("correction_bias", bias)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Initial]:
        return {"weight": Normal(ROUTER_STD)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Converts and moves the module, as `to` and `half` want it, but keeps the bias in fp32."""
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype != accumulator(after.dtype):
            self.correction_bias = before.to(after.device, accumulator(after.dtype))
        return self

    def forward(self, x: Tensor) -> Routing:
        """x [N, hidden] -> `Routing`."""
        wide = accumulator(x.dtype)
        with without_autocast(x.device.type):
            logits = F.linear(x.to(wide), self.weight.to(wide))
            if self.routing == "softmax":
                scores = probabilities = logits.softmax(-1)
            else:
                scores = logits.sigmoid()
                probabilities = scores / (scores.sum(-1, keepdim=True) + SUM_FLOOR)
            experts = self.chosen(scores.detach())
            weights = scores.gather(1, experts)
            if self.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + SUM_FLOOR)
            return Routing(experts, weights * self.scale, probabilities)

    def chosen(self, scores: Tensor) -> Tensor:
        """The experts [N, k] of tokens with scores [N, E]."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if self.top_groups < self.num_groups:
            groups = scores.unflatten(1, (self.num_groups, -1))
            best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            # a stable sort, unlike topk, fixes which of equal scores comes first, on every device
            ranks = best.sort(dim=-1, descending=True, stable=True).indices
            out = torch.ones_like(best, dtype=torch.bool).scatter(
                1, ranks[:, : self.top_groups], False
            )
            scores = groups.masked_fill(out[..., None], -torch.inf).flatten(1)
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        return ranked[:, : self.experts_per_token]

    @torch.no_grad()
    def move_bias(self, counts: Tensor, rate: float) -> None:
        """Adds `rate` to the bias of experts with less than the mean load, and subtracts it for
        experts with more.

        counts: [E], how many tokens of a step chose each expert, over all ranks. Raises ValueError
        for a router without a bias.
        """
        if self.correction_bias is None:
            raise ValueError(f'a bias needs routing="sigmoid", got {self.routing!r}')
        loads = counts.to(torch.float64)
        self.correction_bias.add_(torch.sign(loads.mean() - loads), alpha=rate)


def load_balancing_loss(
    statistics: RoutingStatistics, experts_per_token: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's share of the loss E sum_e f_e P_e, which is the sum of the shares over the ranks
    of `group`. All ranks must call it.

    f_e is the fraction of all ranks' tokens that chose expert e, and P_e the mean of their
    probabilities for it. With equal loads the loss is `experts_per_token`, its minimum for
    probabilities that follow the loads. f has no gradient. The gradients of the shares, summed over
    ranks, are therefore those of the loss, however the tokens are divided, and no gradient crosses
    ranks.

    statistics: those of one layer, or of several with counts and probabilities [.., E]. group: the
    ranks that share the batch, in context and data parallelism together; None: this rank alone.
    Returns a tensor without the last dim, in the dtype of the probabilities.
    Source: Switch Transformers, arXiv 2101.03961, eq. 4; with k experts a token as in Qwen3.
    """
    counts, probabilities = statistics
    counts = counts.detach()
    if group is not None:
        counts = collectives.all_reduce(counts.clone(), group)
    loads = counts.to(torch.float64)
    tokens = (loads.sum(-1, keepdim=True) / experts_per_token).clamp(min=1.0)
    factor = (loads / tokens / tokens).to(probabilities.dtype)
    return counts.shape[-1] * (factor * probabilities).sum(-1)
