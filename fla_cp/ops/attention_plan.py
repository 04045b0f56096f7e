"""Decides which keys a call of softmax attention reads, and how they travel, before it runs."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.keys_values import (
    RINGS,
    SCHEMES,
    Gathered,
    KeysValues,
    LatentSizes,
    Sizes,
    gathered,
    make_exchange,
)  # fmt: skip
from fla_cp.comm.keys_values.ring import Ring, RingCall, forward_step
from fla_cp.comm.overlap import Arriving
from fla_cp.context import FLACPContext, context_of
from fla_cp.handle import Handle
from fla_cp.handle import Sizes as PackingSizes
from fla_cp.kernels.torch import attention as kernels
from fla_cp.ops.checks import check_fixed_call
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.key_tables import KeyTables


def key_tables(
    B: int, T: int, cu_seqlens: Tensor | None, cp_context: FLACPContext | None
) -> KeyTables:
    """The tables of a call: to which keys its queries attend, and where these keys are."""
    if cp_context is None:
        if cu_seqlens is None:
            return _tables_of(tuple(range(0, B * T + 1, T)))
        offsets = tuple(cu_seqlens.tolist())
        check_offsets("cu_seqlens", offsets, T)
        return _tables_of(offsets)
    given = cp_context.global_cu_seqlens, cp_context.token_ranges, cp_context.rank
    if (most := cp_context.max_sequences) is None:
        return cp_context.plans.cached(KeyTables, lambda: KeyTables(*given))
    return cp_context.cached(KeyTables, lambda: KeyTables.fixed(*given, most))


def placed(tokens: int, number: Tensor, rows: int) -> tuple[KeyTables, FLACPContext | None]:
    """For an op of a compiled graph: the tables of a call, and the context that has this number.
    tokens: how many local tokens the call has. rows: how many rows they form. Raises ValueError if
    the context has another number of tokens, or if its group was destroyed."""
    context = context_of(number)
    if context is not None:
        context.check_alive()
        context.check_local_tokens(tokens)
    return key_tables(rows, tokens // rows, None, context), context


def handle_of(cp_context: FLACPContext | None) -> Handle:
    """The handle that stands for a context in a compiled graph. Raises ValueError for a context of
    fixed shape."""
    if cp_context is None:
        return Handle.make(-1, PackingSizes())
    check_fixed_call(cp_context)
    return cp_context.handle


@lru_cache(maxsize=16)
def _tables_of(offsets: tuple[int, ...]) -> KeyTables:
    """The tables of a rank alone, which has all tokens."""
    return KeyTables(offsets, (((0, offsets[-1]),),), 0)


def agreed_scheme(
    exchange: str,
    tables: KeyTables,
    sizes: Sizes,
    dtype: torch.dtype,
    cp_context: FLACPContext | None,
    allowed: tuple[str, ...] = tuple(SCHEMES),
) -> KeysValues:
    """The scheme of a call (`make_exchange`), after the ranks have compared it, if that is due.
    Under a context of fixed shape it raises ValueError for any scheme but "gathered"."""
    if tables.lengths is not None:
        if exchange not in ("auto", "gathered"):
            raise ValueError(
                "exchange must be 'auto' or 'gathered' under a context with max_sequences, got "
                f"{exchange!r}"
            )
        exchange = "gathered"
    name, scheme = make_exchange(exchange, tables, sizes, allowed=allowed)
    if cp_context is not None:
        facts = sizes._asdict()
        del facts["itemsize"]
        cp_context.before("causal_attention", **facts, dtype=dtype, exchange_of_keys=name)
    return scheme


def latent_scheme(
    sizes: LatentSizes, dtype: torch.dtype, tables: KeyTables, cp_context: FLACPContext | None
) -> KeysValues:
    """How latents travel: gathered or in a ring. It is decided like the scheme of keys and values.
    If it is a ring, the ranks compare it, if that is due."""
    if cp_context is None or cp_context.group is None or tables.lengths is not None:
        return Gathered(tables, sizes)
    name, scheme = make_exchange("auto", tables, sizes, allowed=RINGS)
    if isinstance(scheme, Ring):
        facts = sizes._asdict()
        del facts["itemsize"]
        cp_context.before("latent_attention", **facts, dtype=dtype, exchange_of_keys=name)
    return scheme


def ring_call(scheme: KeysValues, scale: float, cp_context: FLACPContext | None) -> RingCall | None:
    """The arguments of a ring; None for another scheme."""
    if not isinstance(scheme, Ring):
        return None
    assert cp_context is not None and cp_context.group is not None, "a ring needs several ranks"
    return RingCall(scheme.tables.ring, cp_context.group, scale, kernels)


def send(scheme: KeysValues, rows: Tensor, group: dist.ProcessGroup | None) -> Arriving | None:
    """Starts the first exchange of a call, in which this rank's rows [T, n] are gathered or go
    round in a ring. None if no exchange is needed."""
    if isinstance(scheme, Ring):
        assert group is not None, "a ring needs several ranks"
        return forward_step(rows, scheme.tables.ring.steps[0], group)
    return gathered.send(rows, scheme.tables.rows, group)


def owned(*xs: Tensor) -> list[Tensor]:
    """The same values, each in contiguous memory of its own, because an op must not return views of
    one tensor. Columns of one tensor are such views; `contiguous` copies them only if there is more
    than one row."""
    seen: set[int] = set()
    found = []
    for x in xs:
        x = x.contiguous()
        memory = x.untyped_storage().data_ptr()
        found.append(x.clone() if memory in seen else x)
        seen.add(memory)
    return found
