"""Splits heads into narrower ones: those of GLA and simple GLA that are wider than the stages take,
and with one decay per head also those for which narrower kernels are faster.

A column of the state depends only on its own value channel. Where nothing is removed from the
state, a row depends only on its own key channel as well:

    o_t = scale * sum over blocks b of key channels of S_b^T q_{t,b}
    S_{t,b} = Diag(a_{t,b}) S_{t-1,b} + k_{t,b} v_t^T

A call of these members with K = 512 and V = 512 is therefore a call with four times the heads and
K = V = 256. Each narrow head takes a block of key channels and a block of value channels, and
outputs are summed over the blocks of key channels. A member that removes something has
blocks of value channels only.

With one decay per head it is faster to split heads into blocks for which a backend has its fastest
kernels
(`fla_cp.kernels.fast_width`). Times in ms, forward / both directions, on one H200: simple GLA with
K = V = 512, T = 8192, H = 8: 1.47 / 5.9 -> 0.82 / 2.6; K = V = 256, T = 16384: 0.85 / 2.5 -> 0.62 /
1.7; gated delta rule with K = 128, V = 256, T = 16384, H = 16: 0.54 / 2.3 -> 0.44 / 1.3. With
one decay per channel, decays have to be copied for each block of value channels: GLA with K = V =
512 gains little (6.6 -> 5.8) and takes 1.5 times the memory, and KDA with V = 256 gains nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fla_cp.kernels import FAST_WIDTH, fast_width, resolve
from fla_cp.ops.checks import MAX_DIM, MAX_WIDE_DIM
from fla_cp.ops.options import Options, Tensors
from fla_cp.rule import CHUNK, NORM_EPS, accumulator

WORTH = 2**17
"""From this product of tokens and heads on, heads are split even if they need not be. Below it,
splitting takes the host more time than it saves on the GPU."""


def width_of_steps(removal: str, x: Tensors) -> int | None:
    """How many channels the narrow heads have in a call that runs token by token; None if its heads
    are not split. The call's arguments must have been checked."""
    return MAX_DIM if removal == "none" and max(x.q.shape[-1], x.v.shape[-1]) > MAX_DIM else None


def width_of_chunks(
    removal: str, per_head: bool, x: Tensors, options: Mapping[str, Any]
) -> int | None:
    """How many channels the narrow heads of a chunked call have; None if its heads are not split.
    The call's arguments need not have been checked. All ranks of a context decide alike."""
    if removal != "none" and not per_head:
        return None
    if not _is_dense(x.q) or not _is_dense(x.v):
        return None
    K, (B, T, HV, V) = x.q.shape[-1], x.v.shape
    if K <= FAST_WIDTH >= V and K <= MAX_DIM >= V:  # a quick test, which is true for most calls
        return None
    several = getattr(options.get("cp_context"), "world_size", 1) > 1
    size = WORTH if several else B * T * HV  # the ranks may have different numbers of tokens
    per_head = per_head and options.get("chunk_size") in (None, CHUNK)
    where = options.get("impl", "auto"), x.q.device, x.q.dtype
    return block_width(removal, per_head, K, V, size, *where)


def block_width(
    removal: str,
    per_head: bool,
    K: int,
    V: int,
    size: int,
    impl: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> int | None:
    """How many channels narrow heads have; None if heads are not split. per_head: whether there is
    one decay a head, and chunks have 64 tokens. size: tokens times heads."""
    widest, both = max(K, V), removal == "none"
    if widest <= min(FAST_WIDTH, MAX_DIM) or widest > (MAX_WIDE_DIM if both else MAX_DIM):
        return None  # of the second, the checks say what is wrong
    must = widest > MAX_DIM
    fast = _fast_width(impl, device, dtype) if per_head and (must or size >= WORTH) else None
    pays = fast is not None and widest > fast and K % fast == V % fast == 0
    if pays and (both or (removal == "k" and fast == K)):
        return fast
    return MAX_DIM if must else None


def _fast_width(impl: Any, device: torch.device, dtype: torch.dtype) -> int | None:
    """`fast_width` of a call's backend. None if there is no such backend: checks say what is
    wrong."""
    try:
        return fast_width(resolve(impl, device, dtype), dtype)
    except ValueError:
        return None


# torch.compile does not trace it. torch.compiler.assume_constant_result sets this, too, but imports
# torch._dynamo, which takes programs that compile nothing a second.
_fast_width._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_dense(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.ndim == 4


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
    def of(cls, x: Tensors, width: int) -> "Blocks":
        """width: the most channels of a block."""
        (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
        keys, values = -(-K // width), -(-V // width)
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
    width: int,
) -> tuple[Any, ...]:
    """The result of a call with wide heads, whose arguments the caller has checked. options: the
    keywords that were given. o: the same with defaults. v_first: whether states are [V, K]. call:
    the same operator on narrow heads, which have at most `width` channels.

    Raises ValueError for states in a pool, because each call would have to copy the whole pool.
    """
    if o.ssm_state_indices is not None:
        raise ValueError(
            f"ssm_state_indices must be None for K or V above {MAX_DIM}, got K={x.q.shape[-1]}, "
            f"V={x.v.shape[-1]}"
        )
    b, (q, k), per_head = Blocks.of(x, width), (x.q, x.k), x.g.ndim == 3
    given = {n: t for n, t in options.items() if n not in _LAYOUTS}
    if b.keys > 1 and o.use_qk_l2norm_in_kernel:  # a kernel would take the norm of a block
        q, k, given["use_qk_l2norm_in_kernel"] = _unit(q), _unit(k), False
    narrow = Tensors(
        b.of_keys(q),
        b.of_keys(k),
        b.of_values(x.v),
        b.of_heads(x.g) if per_head else b.of_channels(x.g),
        None if x.beta is None else b.of_heads(x.beta),
        x.p,
    )
    given |= {"inplace_final_state": False}
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


_LAYOUTS = ("transpose_state_layout", "state_v_first")


def _unit(x: Tensor) -> Tensor:
    """x as use_qk_l2norm_in_kernel would normalise it."""
    wide = x.to(accumulator(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype)
