"""Splits heads of GLA and simple GLA that are wider than the stages take into narrow heads.

These members remove nothing from the state, so a row of the state depends only on its own key
channel, and a column only on its own value channel:

    o_t = scale * sum over blocks b of key channels of S_b^T q_{t,b}
    S_{t,b} = Diag(a_{t,b}) S_{t-1,b} + k_{t,b} v_t^T

A call with K = 512 and V = 512 is therefore a call with four times the heads and K = V = 256. Each
narrow head takes a block of key channels and a block of value channels, and outputs are summed over
the blocks of key channels.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fla_cp.ops.checks import MAX_DIM, MAX_WIDE_DIM
from fla_cp.ops.options import Options, Tensors
from fla_cp.rule import NORM_EPS, accumulator


def are_wide(removal: str, x: Tensors) -> bool:
    """Whether a call's heads must be split. The call's arguments need not have been checked."""
    given: tuple[object, ...] = x.q, x.v
    if removal != "none" or not all(isinstance(t, Tensor) and _is_dense(t) for t in given):
        return False
    return MAX_DIM < max(x.q.shape[-1], x.v.shape[-1]) <= MAX_WIDE_DIM


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and x.ndim == 4


class Blocks(NamedTuple):
    """How heads are split. There are H key heads of K channels, with G value heads of V channels
    each. K is split into `keys` blocks of BK channels, V into `values` blocks of BV channels. The
    last block may be filled up with zeros."""

    H: int
    G: int
    K: int
    V: int
    keys: int
    values: int
    BK: int
    BV: int

    @classmethod
    def of(cls, x: Tensors) -> "Blocks":
        (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
        keys, values = -(-K // MAX_DIM), -(-V // MAX_DIM)
        return cls(H, HV // H, K, V, keys, values, -(-K // keys), -(-V // values))

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """The sizes by which narrow value heads are numbered: key head, block of its keys, value
        head of the key head, block of its values. The first two number the narrow key heads."""
        return self.H, self.keys, self.G, self.values

    def of_keys(self, x: Tensor) -> Tensor:
        """q or k [.., H, K] -> [.., H * keys, BK]"""
        return (
            self._filled(x, self.keys * self.BK).unflatten(-1, (self.keys, self.BK)).flatten(-3, -2)
        )

    def of_values(self, v: Tensor) -> Tensor:
        """v [.., HV, V] -> [.., H * keys * G * values, BV]"""
        v = self._filled(v, self.values * self.BV)
        v = v.unflatten(-1, (self.values, self.BV)).unflatten(-3, (self.H, 1, self.G))
        return v.expand(*v.shape[:-5], *self.heads, self.BV).flatten(-5, -2)

    def of_channels(self, g: Tensor) -> Tensor:
        """One number for each key channel [.., HV, K] -> [.., H * keys * G * values, BK]"""
        g = self._filled(g, self.keys * self.BK).unflatten(-1, (self.keys, self.BK))
        g = g.unflatten(-3, (self.H, self.G)).transpose(-3, -2).unsqueeze(-2)
        return g.expand(*g.shape[:-5], *self.heads, self.BK).flatten(-5, -2)

    def of_heads(self, g: Tensor) -> Tensor:
        """One number for each head [.., HV] -> [.., H * keys * G * values]"""
        g = g.unflatten(-1, (self.H, 1, self.G, 1))
        return g.expand(*g.shape[:-4], *self.heads).flatten(-4, -1)

    def of_states(self, S: Tensor) -> Tensor:
        """States [.., HV, K, V] -> [.., H * keys * G * values, BK, BV]"""
        S = self._filled(S, self.values * self.BV).unflatten(-1, (self.values, self.BV))
        S = pad(S, (0, 0, 0, 0, 0, self.keys * self.BK - self.K))
        S = S.unflatten(-3, (self.keys, self.BK)).unflatten(-5, (self.H, self.G))
        # H, G, keys, BK, values, BV
        return S.movedim((-4, -2), (-5, -3)).flatten(-6, -3)

    def states(self, S: Tensor) -> Tensor:
        """The inverse of `of_states`."""
        S = S.unflatten(-3, self.heads).movedim((-5, -3), (-4, -2))
        return S.flatten(-6, -5).flatten(-4, -3).flatten(-2, -1)[..., : self.K, : self.V]

    def output(self, o: Tensor) -> Tensor:
        """o [.., H * keys * G * values, BV] -> [.., HV, V], summed in fp32 (fp64)."""
        o = o.unflatten(-2, self.heads)
        if self.keys > 1:
            o = o.sum(-4, dtype=accumulator(o.dtype)).to(o.dtype)
        else:
            o = o.squeeze(-4)
        return o.flatten(-4, -3).flatten(-2, -1)[..., : self.V]

    @staticmethod
    def _filled(x: Tensor, channels: int) -> Tensor:
        missing = channels - x.shape[-1]
        return pad(x, (0, missing)) if missing else x


def in_narrow_heads(
    x: Tensors,
    options: Mapping[str, Any],
    o: Options,
    v_first: bool,
    call: Callable[[Tensors, dict[str, Any]], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """The result of a call with wide heads, whose arguments the caller has checked. options: the
    keywords that were given. o: the same with defaults. v_first: whether states are [V, K]. call:
    the same operator on narrow heads.

    Raises ValueError for states in a pool, because each call would have to copy the whole pool.
    """
    if o.ssm_state_indices is not None:
        raise ValueError(
            f"ssm_state_indices must be None for K or V above {MAX_DIM}, got K={x.q.shape[-1]}, "
            f"V={x.v.shape[-1]}"
        )
    b = Blocks.of(x)
    q, k = (_unit(t) if o.use_qk_l2norm_in_kernel else t for t in (x.q, x.k))
    per_head = x.g.ndim == 3
    narrow = Tensors(
        b.of_keys(q),
        b.of_keys(k),
        b.of_values(x.v),
        b.of_heads(x.g) if per_head else b.of_channels(x.g),
    )
    given = {n: t for n, t in options.items() if n not in _LAYOUTS}
    given |= {"use_qk_l2norm_in_kernel": False, "inplace_final_state": False}
    given["scale"] = b.K**-0.5 if o.scale is None else o.scale
    if not o.inplace_final_state:
        del given["inplace_final_state"]
    else:
        given["output_final_state"] = True
    S = o.initial_state
    if S is not None:
        given["initial_state"] = b.of_states(S.mT if v_first else S)
    if o.A_log is not None:
        given["A_log"] = b.of_heads(o.A_log.flatten())
    if o.dt_bias is not None:
        bias = o.dt_bias.flatten()
        given["dt_bias"] = (
            b.of_heads(bias) if per_head else b.of_channels(bias.unflatten(0, (-1, b.K))).flatten()
        )
    out, final, *states = call(narrow, given)

    def outside(S: Tensor | None) -> Tensor | None:
        if S is None:
            return None
        S = b.states(S)
        return (S.mT if v_first else S).contiguous()

    final = outside(final)
    if o.inplace_final_state:
        assert S is not None and final is not None
        final = S.copy_(final)
    return b.output(out), final, *map(outside, states)


_LAYOUTS = ("transpose_state_layout", "state_v_first", "use_qk_l2norm_in_kernel")


def _unit(x: Tensor) -> Tensor:
    """x as use_qk_l2norm_in_kernel would normalise it. In the kernel that would be the norm of a
    block, not of the wide head."""
    wide = x.to(accumulator(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype)
