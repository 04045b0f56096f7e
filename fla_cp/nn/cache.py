"""Caches: what layers keep of earlier tokens, for generation.

A cache belongs to one layer and to the rows of one batch. A layer that is called with a cache reads
it, and adds the tokens of the call to it. A call may have any number of tokens. Ranks may share the
tokens of a call under a context of one sequence. The cache of each rank then holds all tokens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_cp.arguments import check_count, described
from fla_cp.context import FLACPContext
from fla_cp.kernels.torch.decoding import Deferred
from fla_cp.ops.checks import FLOATS
from fla_cp.partition.device_tables import to_device


class RecurrentCache:
    """The cache of a linear-attention layer. conv: the convolution's state [B, D, W]. state: the
    operator's state [B, HV, K, V], fp32 (fp64). Both are None before the first token.

    Steps of generation that decode many rows write a state only in one of several steps, and keep
    elsewhere what it lacks. Reading the attribute `state` brings the state up to date. From then
    on, steps write all of it, so that the tensor stays up to date, and they take longer. The same
    is true of a state that was passed to the constructor or assigned.
    """

    _state: Tensor | None
    _shown: bool
    """Whether others may have the state's tensor, so that it must stay up to date."""
    _deferred: Deferred | None

    def __init__(self, conv: Tensor | None = None, state: Tensor | None = None) -> None:
        self.conv = conv
        self.state = state

    @property
    def state(self) -> Tensor | None:
        if self._state is not None and not self._shown:
            self.up_to_date()
            self._shown = True
            if self._deferred is not None:
                self._deferred.reset(True)
        return self._state

    @state.setter
    def state(self, state: Tensor | None) -> None:
        self._state, self._shown, self._deferred = state, state is not None, None

    def up_to_date(self) -> Tensor | None:
        """The state as it is now. Later steps may leave out what they change in it."""
        if self._deferred is not None and not self._shown:
            _write_back(self._deferred)
        return self._state

    def take(self) -> Tensor | None:
        """The state for a layer that changes it in place, or replaces it."""
        state, self._deferred = self.up_to_date(), None
        return state

    def put(self, state: Tensor | None) -> None:
        """Keeps a layer's new state, which nobody else has unless it is the same tensor."""
        self._shown &= state is self._state
        self._state = state

    def defer(self, deferred: Deferred | None) -> None:
        """Brings the state up to date; from then on, `deferred` has what it lacks."""
        if deferred is not self._deferred:
            self.take()
            self._deferred = deferred
            if deferred is not None:
                deferred.reset(self._shown)

    def places(self) -> tuple[object, ...]:
        """What changes if conv, the state or its `Deferred` is replaced."""
        held = (0 if x is None else x.data_ptr() for x in self.tensors())
        return *held, self._deferred

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """conv and the state, which may not be up to date."""
        return self.conv, self._state

    def has(self, conv: Tensor, state: Tensor) -> bool:
        """Whether these very tensors are in the cache."""
        return self.conv is conv and self._state is state

    def rows(self) -> int | None:
        """How many rows there are; None before the first token."""
        return None if self._state is None else len(self._state)

    def __copy__(self) -> RecurrentCache:
        """A cache with the same tensors."""
        state, copied = self.state, object.__new__(type(self))
        copied.__dict__ |= self.__dict__ | {"_state": state, "_deferred": None}
        return copied

    def __getstate__(self) -> dict[str, Any]:  # for deep copies and pickles
        return self.__dict__ | {"_state": self.up_to_date(), "_deferred": None, "_shown": False}

    @staticmethod
    def joined(caches: Sequence[RecurrentCache]) -> RecurrentCache:
        """One cache with the rows of all. Each must have seen a token."""
        found = RecurrentCache(_cat([c.conv for c in caches]))
        found.put(_cat([c.up_to_date() for c in caches]))
        return found


def _write_back(deferred: Deferred) -> None:
    """Runs `write_back`, which torch.compile must not trace. Only programs that compile have
    imported Dynamo."""
    run = _untraced() if "torch._dynamo" in sys.modules else _run_write_back
    run(deferred)


def _run_write_back(deferred: Deferred) -> None:
    deferred.write_back()


@functools.cache
def _untraced() -> Callable[[Deferred], None]:
    run: Callable[[Deferred], None] = torch.compiler.disable(_run_write_back)
    return run


@dataclass
class AttentionCache:
    """The cache of a softmax-attention layer.

    keys: [B, capacity, HK, K]. values: [B, capacity, HK, V]. For latent attention HK is 1, the
    values are the latents, and the keys are the latents and the shared channels. lengths: [B]
    int64, how many tokens each row has. written: how many tokens the longest row has. shared:
    whether another cache writes to the same memory, so that `written` may be out of date.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    written: int = 0
    shared: bool = False

    def rows(self) -> int:
        """How many rows there are."""
        return len(self.keys)

    def fixed(self) -> FixedAttentionCache:
        """A cache in the same memory, for steps that a CUDA graph repeats. Both may be used in any
        order: from now on, calls with this cache read the number of tokens from the device."""
        self.shared = True
        return FixedAttentionCache(self.keys, self.values, self.lengths, self.written, True)

    def longest(self) -> int:
        """How many tokens the longest row has. The host waits for the device if the memory is
        shared."""
        if self.shared:
            self.written = int(self.lengths.max())
        return self.written

    @staticmethod
    def joined(caches: Sequence[AttentionCache]) -> AttentionCache:
        """One cache with the rows of all. All must have the same capacity."""
        return AttentionCache(
            torch.cat([c.keys for c in caches]),
            torch.cat([c.values for c in caches]),
            torch.cat([c.lengths for c in caches]),
            max(c.longest() for c in caches),
        )

    def positions(self, tokens: int, cp_context: FLACPContext | None = None) -> Tensor:
        """The positions of each row's next tokens, [B, tokens]; under a context, of this rank's
        tokens among them."""
        device = self.lengths.device
        if cp_context is None:
            next_tokens = torch.arange(tokens, dtype=torch.int64, device=device)
        else:
            next_tokens = to_device(_own_places(cp_context), torch.int64, device)
        return self.lengths[:, None] + next_tokens

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        cp_context: FLACPContext | None = None,
        expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """o [B, T, H, V] of the next T tokens, whose keys and values are written first.

        Query h reads key head h // (H / HK). Under a context q, k and v are this rank's tokens, and
        all ranks' keys and values are gathered. expand: returns the keys and values that queries
        read, for those that are kept [B, n, HK, ..]; by default they are the same. Raises
        ValueError if the tokens do not fit.
        """
        own = self.positions(q.shape[1], cp_context)
        if cp_context is not None:
            k, v = cp_context.unshard(k), cp_context.unshard(v)
        T = k.shape[1]
        columns = self.reserved(T)
        places = self.positions(T)
        rows = torch.arange(len(k), dtype=torch.int64, device=k.device)[:, None]
        self.keys[rows, places] = k.to(self.keys.dtype)
        self.values[rows, places] = v.to(self.values.dtype)
        self.lengths += T
        seen = torch.arange(columns, dtype=torch.int64, device=q.device) <= own[..., None]
        keys, values = self.keys[:, :columns], self.values[:, :columns]
        if expand is not None:
            keys, values = expand(keys, values)
            q = q.to(values.dtype)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.to(q.dtype).transpose(1, 2),
            values.to(q.dtype).transpose(1, 2),
            attn_mask=seen[:, None],
            scale=scale,
            enable_gqa=True,
        )
        return o.transpose(1, 2)

    def reserved(self, tokens: int) -> int:
        """How many places of the cache a row may read once the next tokens are written. Raises
        ValueError if the tokens do not fit."""
        capacity, needed = self.keys.shape[1], self.longest() + tokens
        if needed > capacity:
            raise ValueError(
                f"cache must have room for {needed} tokens, got a capacity of {capacity}"
            )
        self.written = needed
        return needed


class FixedAttentionCache(AttentionCache):
    """A cache for CUDA graphs, whose calls always do the same: each reads all places, and a mask
    hides those that are not written. Only the device knows how many tokens there are, so the caller
    must make sure that they fit. written: the number when the cache was made."""

    def reserved(self, tokens: int) -> int:
        return self.keys.shape[1]


LayerCache = RecurrentCache | AttentionCache

# FSDP2 with mixed precision copies every dataclass among a module's arguments. The layer would
# update the copy, and the caller's cache would stay as it was.
del AttentionCache.__dataclass_fields__


def check_cache_sizes(rows: object, capacity: object) -> None:
    """Checks the arguments of a layer's make_cache."""
    check_count("rows", rows)
    check_count("capacity", capacity)


def attention_cache(
    layer: nn.Module,
    project: str,
    rows: int,
    capacity: int,
    heads: int,
    channels: int,
    value_channels: int,
) -> AttentionCache:
    """An empty cache, after a check of rows and capacity. project: the name of the projection whose
    weight has the cache's dtype and device. If it is quantised, they are those of another parameter
    of the layer, or fp32."""
    check_cache_sizes(rows, capacity)
    dtype, device = _stored_as(getattr(layer, project), layer)
    return AttentionCache(
        torch.zeros(rows, capacity, heads, channels, dtype=dtype, device=device),
        torch.zeros(rows, capacity, heads, value_channels, dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )


def check_cache(
    cache: object,
    kind: type[LayerCache],
    x: Tensor,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
) -> None:
    """Raises ValueError for a call that cannot use this cache. kind: the class of the layer's
    caches."""
    if not isinstance(cache, kind):
        raise ValueError(
            f"cache must be {kind.__name__}, as make_cache of this layer makes it, got "
            f"{described(cache)}"
        )
    if torch.is_grad_enabled():
        raise ValueError("cache must be None while gradients are recorded: use torch.no_grad()")
    if cu_seqlens is not None:
        raise ValueError("cache must be None with cu_seqlens")
    if cp_context is not None and cp_context.global_cu_seqlens != (0, cp_context.total_tokens):
        raise ValueError(
            "cp_context must have one sequence beside a cache, got "
            f"{len(cp_context.global_cu_seqlens) - 1}"
        )
    rows = cache.rows()
    if rows is not None and rows != len(x):
        raise ValueError(f"cache must have the {len(x)} rows of x, got {rows}")


def _stored_as(project: nn.Module, layer: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of a cache of the layer, see `attention_cache`."""
    given = getattr(project, "weight", None), *layer.parameters(), *layer.buffers()
    tensors = [x for x in given if isinstance(x, Tensor)]
    for x in tensors:
        if x.dtype in FLOATS:
            return x.dtype, x.device
    return torch.float32, tensors[0].device if tensors else torch.device("cpu")


def _own_places(context: FLACPContext) -> list[int]:
    """The positions of this rank's tokens in the sequence."""
    return [t for lo, hi in context.token_ranges[context.rank] for t in range(lo, hi)]


def _cat(parts: Sequence[Tensor | None]) -> Tensor:
    found = [x for x in parts if x is not None]
    if len(found) != len(parts):
        raise ValueError("caches must each have seen a token before they are joined")
    return torch.cat(found)
