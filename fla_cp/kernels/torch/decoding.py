"""Stages of a decoding step, in plain torch: one token for each of B sequences, forward only."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp.rule import DeltaRule, accumulator


class StepProduct(NamedTuple):
    """A linear layer of one token a sequence, with what stands before and behind it.

    x: [B, G * C], rows any distance apart, of G inputs side by side. weight: [G, R, C], contiguous,
    in x's dtype; input g is multiplied by weight[g]. norm [C], eps: x is x / rms(x) * norm first;
    with one input only. bias: [G * R]. swiglu: the product's first R / 2 columns are the gate of
    the others, so that the result is silu(gate) * up with R / 2 columns; with one input only.
    onto: [B, R], to which the result is added in place; with one input only.
    """

    x: Tensor
    weight: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    bias: Tensor | None = None
    swiglu: bool = False
    onto: Tensor | None = None


class StepMixer(NamedTuple):
    """What stands between the first and the last product of a recurrent layer: convolution with
    SiLU, recurrence and gated norm.

    rule: without p, states [K, V]. qkv: [B, D], rows any distance apart, raw q [H * K], k [H * K]
    and v [HV * V]. window: [B, D, W], the `cache` of the convolution; taps [D, W] and bias [D] or
    None are its parameters. state: [B, HV, K, V]. Window and state are updated in place. decay:
    raw, [B, HV * K] or [B, HV]. gate: [B, HV * V], before its activation. beta: [B, HV] or None.
    A_log, dt_bias: as in `Inputs`. norm: [V], with eps; activation: of the gate.

    A kernel may read window, state and parameters before the kernel ahead of it has ended
    (kernels/triton/early.py): that one must not have written them.
    """

    rule: DeltaRule
    qkv: Tensor
    window: Tensor
    taps: Tensor
    bias: Tensor | None
    state: Tensor
    decay: Tensor
    gate: Tensor
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    norm: Tensor
    eps: float
    activation: str

    @property
    def key_heads(self) -> int:
        """H."""
        HV, K, V = self.state.shape[1:]
        return (self.qkv.shape[1] - HV * V) // (2 * K)


def normed(p: StepProduct) -> Tensor:
    """x, normalised if there is a norm."""
    return p.x if p.norm is None else F.rms_norm(p.x, p.norm.shape, p.norm, p.eps)


def plain_product(p: StepProduct, x: Tensor) -> Tensor:
    """The product [B, G * R] of x [B, G * C] with its bias, or `onto`, which it is then added to.

    Several inputs are one batch of products, of which each writes its columns of the result.
    """
    G, R, C = p.weight.shape
    if p.onto is not None:
        return p.onto.addmm_(x, p.weight[0].t())
    if G == 1:
        y = torch.mm(x, p.weight[0].t())
    else:
        y = torch.empty(len(x), G * R, dtype=x.dtype, device=x.device)
        inputs = x.unflatten(1, (G, C)).transpose(0, 1)
        torch.bmm(inputs, p.weight.mT, out=y.unflatten(1, (G, R)).transpose(0, 1))
    return y if p.bias is None else y.add_(p.bias)


def step_product(p: StepProduct) -> Tensor:
    """[B, G * R], or [B, R / 2] with swiglu, in x's dtype; `onto` itself if it is given."""
    if not p.swiglu:
        return plain_product(p, normed(p))
    gate, up = plain_product(p._replace(onto=None), normed(p)).chunk(2, 1)
    y = F.silu(gate) * up
    return y if p.onto is None else p.onto.add_(y)


def conv_update(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """y [N, D] of the convolution (kernels/torch/conv.py) of one more token x [N, D] of each
    sequence, whose rows may be any distance apart. cache [N, D, W]: the last W tokens, in any
    floating dtype and read in x's; its columns move by one, and x becomes the last."""
    cache.copy_(torch.cat((cache[:, :, 1:], x[:, :, None].to(cache.dtype)), 2))
    dtype = accumulator(x.dtype)
    window = cache.to(x.dtype).to(dtype)
    window[:, :, -1] = x  # a narrower cache has rounded it
    y = (window * weight.to(dtype)).sum(2)
    y = y if bias is None else y + bias.to(dtype)
    return (F.silu(y) if silu else y).to(x.dtype)


class Deferred(Protocol):
    """What a layer's state [B, HV, K, V] lacks, where steps do not write all of it."""

    def write_back(self) -> None:
        """Brings the state up to date. The host does not wait for it."""

    def reset(self, every_step: bool) -> None:
        """Says that the state is up to date as it is in memory. every_step: whether the steps that
        follow write all of it, so that it stays up to date."""


class StepRun(Protocol):
    """Layers that run together: a call replaces x [B, C] by the residual stream behind all of them,
    and updates their windows and states. deferred: for each layer what its state lacks afterwards;
    empty if steps write all of their states."""

    @property
    def deferred(self) -> Sequence[Deferred]: ...

    def __call__(self, x: Tensor) -> None: ...


class StepLayer(NamedTuple):
    """A recurrent layer and the SwiGLU behind it, for one more token of each sequence:
    x += o_proj(mixer(norm(x))), then x += down(SwiGLU(ffn_norm(x))).

    into: [N, C], the rows of q, k and v, which the convolution with window [B, D, W] and taps
    [D, W] follows, and then those of the other projections. decay, gate, beta: the first of their
    columns among the N (beta: None if there is none). decay_up [HV * K, rank], gate_up
    [HV * V, rank] or None: second products, of which decay and gate are the inputs; gate_bias
    [HV * V] or None is added then. out: [C, HV * V]. up: [2 F, C], the gate's rows first. down:
    [C, F]. Everything else is as in `StepMixer`.
    """

    rule: DeltaRule
    norm: Tensor
    eps: float
    into: Tensor
    window: Tensor
    taps: Tensor
    bias: Tensor | None
    state: Tensor
    decay: int
    decay_up: Tensor | None
    gate: int
    gate_up: Tensor | None
    gate_bias: Tensor | None
    beta: int | None
    A_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    o_eps: float
    activation: str
    out: Tensor
    ffn_norm: Tensor
    ffn_eps: float
    up: Tensor
    down: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Sizes, dtypes and options: what layers that run together have in common."""
        return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in self)
