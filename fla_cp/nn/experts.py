"""Mixture of experts: each token goes through a few of many SwiGLU networks.

Tokens are copied once for each of their experts, and the copies are sorted by expert. Grouped
products take all experts at once. The results return to their tokens and are summed in the order of
choice, so no sum depends on how operations are scheduled. Where the group of an expert ends is
known only on the device, and no shape depends on it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_cp.arguments import check_count, check_flags
from fla_cp.nn.grouped import grouped_linear
from fla_cp.nn.initial import Initial, InitializedModule, Normal
from fla_cp.nn.modules import SwiGLU, check_hidden, check_inner_dtype
from fla_cp.nn.routing import Router, RoutingStatistics
from fla_cp.once_differentiable import once_differentiable
from fla_cp.replay import autocasts

EXPERT_STD = 0.02


class ExpertWeights(InitializedModule):
    """The matrices of E SwiGLU networks: gate_up [E, 2 ffn, hidden], whose first ffn rows are those
    of the gate, and down [E, hidden, ffn]."""

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Initial]:
        return {"gate_up": Normal(EXPERT_STD), "down": Normal(EXPERT_STD)}

    def forward(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The output of each row's expert times the row's weight, [M, hidden].

        rows: [M, hidden], sorted by expert. weights: [M]. ends: [E] int32, where the rows of each
        expert end. The weight multiplies the inner values. The result is the same, and the backward
        then does not need the outputs.
        """
        inner = grouped_linear(rows, self.gate_up.to(rows.dtype), ends)
        gate, up = inner.chunk(2, -1)
        inner = F.silu(gate) * up * weights[:, None].to(rows.dtype)
        return grouped_linear(inner, self.down.to(rows.dtype), ends)


def _copied(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """The copies of tokens x [N, D] in sorted order, [N * copies, D]. Row j is the token of copy
    order[j]."""
    return x.index_select(0, order // copies)


def _returned(y: Tensor, places: Tensor, copies: int) -> Tensor:
    """The adjoint of `_copied`: for each token the sum of its copies. Copy i is row places[i]."""
    return y.index_select(0, places).unflatten(0, (-1, copies)).sum(1)


class _Dispatch(torch.autograd.Function):
    """(x, order, places, copies) -> the sorted copies of the rows of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return _copied(x, order, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _returned(grad, places, ctx.copies), None, None, None


class _Combine(torch.autograd.Function):
    """(y, order, places, copies) -> for each token the sum of its copies."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _returned(y, places, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return _copied(grad, order, ctx.copies), None, None, None


class Experts(nn.Module):
    """A mixture of SwiGLU experts, and optionally shared ones that every token takes.

    hidden_size: width of x. expert_size: inner width of an expert. num_experts, experts_per_token,
    routing, normalize, scale, num_groups, top_groups: as in `Router`. shared_experts: how many
    experts every token takes. Together these are one SwiGLU of width shared_experts * expert_size.
    shared_gate: multiply its output by sigmoid(x w), with weights w [hidden], as in Qwen3-Next.

    Kimi Linear: routing="sigmoid", scale=2.446, shared_experts=1. Qwen3-Next: routing="softmax",
    shared_experts=1, shared_gate=True.
    Raises ValueError for sizes that are not integers from 1, for counts that do not fit, and unless
    scale is a finite number above 0.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        routing: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        shared_experts: int = 0,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        check_count("expert_size", expert_size)
        check_flags(("shared_gate",), (shared_gate,))
        if shared_experts != 0:
            check_count("shared_experts", shared_experts)
        elif shared_gate:
            raise ValueError(f"shared_gate needs shared_experts from 1, got {shared_experts}")
        self.hidden_size = hidden_size
        self.router = Router(
            hidden_size,
            num_experts,
            experts_per_token,
            routing=routing,
            normalize=normalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
        )
        self.experts = ExpertWeights(num_experts, hidden_size, expert_size)
        size = shared_experts * expert_size
        self.shared = SwiGLU(hidden_size, size) if shared_experts else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if shared_gate else None

    def forward(self, x: Tensor) -> tuple[Tensor, RoutingStatistics]:
        """x [B, T, hidden] -> the same shape and dtype, and the call's `RoutingStatistics`.

        The statistics are returned, and not added up in the module, because a recomputed forward
        would count twice. Under autocast, experts compute in its dtype and the router in fp32.
        """
        check_hidden(x, self.hidden_size, None, None)
        if not x.is_floating_point():
            raise ValueError(f"x must have a floating dtype, got {x.dtype}")
        tokens, copies = x.flatten(0, 1), self.router.experts_per_token
        routing = self.router(tokens)
        order, places, ends = sorted_by_expert(routing.experts, self.router.num_experts)
        kind = x.device.type
        if autocasts(kind):
            tokens = tokens.to(torch.get_autocast_dtype(kind))
        rows = _Dispatch.apply(tokens, order, places, copies)
        weights = routing.weights.flatten().index_select(0, order)
        rows = self.experts(rows, weights, ends)
        out = _Combine.apply(rows, order, places, copies).view(x.shape)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                check_inner_dtype(x, "shared_gate", self.shared_gate)
                shared = shared * torch.sigmoid(self.shared_gate(x))
            out = out + shared
        counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1])).to(torch.int64)
        return out.to(x.dtype), RoutingStatistics(counts, routing.probabilities.sum(0))


def sorted_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the copies of tokens by expert, and those of one expert by token.

    experts: [N, k]; copy i is that of token i // k. Returns order [N * k], the copy in each row;
    places [N * k], the row of each copy; and ends [E] int32, the row after the last one of each
    expert.
    """
    ordered, order = experts.flatten().to(torch.int32).sort(stable=True)
    rows = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, rows)
    every = torch.arange(num_experts, dtype=torch.int32, device=order.device)
    return order, places, torch.searchsorted(ordered, every, right=True, out_int32=True)
