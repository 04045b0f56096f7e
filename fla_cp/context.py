"""FLACPContext: which rank owns which tokens of one batch, and what follows from it.

Every rank builds the same table from the GLOBAL cu_seqlens, on the host. Example: sequences
[0,100) and [100,160) on two ranks, contiguous: rank 0 owns [0,80), rank 1 [80,160). The first
sequence continues on rank 1, so rank 0 sends one state to rank 1 and, with a convolution of width
4, the tokens 77, 78 and 79.
"""

from __future__ import annotations

import atexit
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import remat
from fla_cp.arguments import check_count, check_flags
from fla_cp.comm import Agreement, Exchange, Halo, Links, collectives, make_exchange, scheme_of
from fla_cp.handle import Handle
from fla_cp.partition.checks import (
    check_conv1d_kernel_size,
    check_cu_seqlens,
    check_exchange,
    check_group,
    check_host_copy,
    check_max_sequences,
    check_offsets,
    check_sequences_fit,
    check_token_ranges,
    length_in,
    refuse_length,
    token_ranges_of,
)
from fla_cp.partition.device_tables import Tabled, fill, to_device
from fla_cp.partition.fla_names import FLANames
from fla_cp.partition.key_tables import KeyTables
from fla_cp.partition.on_ranks import framed, layout, packing_on, padded
from fla_cp.partition.packing import Packing
from fla_cp.partition.token_ranges import Ranges, contiguous_token_ranges
from fla_cp.rule import DeltaRule

_NUMBERS = itertools.count()
_BY_NUMBER: WeakValueDictionary[int, FLACPContext] = WeakValueDictionary()
"""Contexts by the number that compiled graphs hold in their place."""

_USED: deque[FLACPContext] = deque(maxlen=256)
"""The contexts that compiled graphs ran under last. They are kept for the backward passes."""


@atexit.register
def _let_go() -> None:
    """Releases the groups of all contexts when the interpreter ends, because a gloo group that is
    then still alive can abort the process. In a script without functions, variables such as a model
    or a loss keep contexts until the end."""
    _USED.clear()
    for context in [*_BY_NUMBER.values()]:
        for holder in (context.exchange, context):
            getattr(holder, "__dict__", {}).clear()


def context_of(number: Tensor) -> FLACPContext | None:
    """The context with this number; None for -1. Raises ValueError if it no longer exists."""
    n = int(number)
    if n < 0:
        return None
    context = _BY_NUMBER.get(n)
    if context is None:
        raise ValueError(f"cp_context {n} of a compiled graph no longer exists")
    _USED.append(context)
    return context


@dataclass(frozen=True, eq=False)
class FLACPContext(Tabled, FLANames):
    """The sharding of one batch; build it with `build_cp_context`, once for all layers.

    group: process group of the ranks that share the batch (None: one rank).
    cu_seqlens: offsets of this rank's pieces of sequences, int32, on the device of the offsets
    given. cu_seqlens_cpu: the same on the host. global_cu_seqlens: the offsets of the whole batch,
    on the host, which end with total_tokens. local_tokens: how many tokens this rank holds.
    token_ranges: those of all ranks.
    max_sequences: if given, the shape of the context is fixed. Its offsets are padded with empty
    sequences, and `update` makes it the context of another packing.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    global_cu_seqlens: tuple[int, ...]
    local_tokens: int
    token_ranges: tuple[Ranges, ...]
    conv1d_kernel_size: int | None
    packing: Packing = field(repr=False)
    links: Links = field(repr=False)
    exchange: Exchange = field(repr=False)
    halo: Halo | None = field(repr=False)
    max_sequences: int | None = None
    agreement: Agreement | None = field(default=None, repr=False)
    handle: Handle = field(init=False, repr=False)
    crosses: bool = field(init=False, repr=False)
    group_name: str = field(init=False, repr=False)
    process: int = field(init=False, repr=False)
    _repeated: dict[int, FLACPContext] = field(init=False, repr=False, default_factory=dict)
    _packings: dict[int, Packing] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        number = next(_NUMBERS)
        with torch.inference_mode(False):  # compiled graphs save the handle for their backward
            handle = Handle.of(number, self.packing, self.links, self.halo)
        object.__setattr__(self, "handle", handle)
        object.__setattr__(self, "crosses", self.links.any)
        name = "" if self.group is None else self.group.group_name
        object.__setattr__(self, "group_name", name)
        # The process's global rank, with which `check_alive` asks for the group.
        process = 0 if self.group is None else dist.get_global_rank(self.group, self.rank)
        object.__setattr__(self, "process", process)
        _BY_NUMBER[number] = self

    @property
    def total_tokens(self) -> int:
        return self.global_cu_seqlens[-1]

    def check_alive(self) -> None:
        """Raises ValueError if the context's group was destroyed."""
        if self.group is not None and not torch.compiler.is_compiling():
            try:
                dist.get_group_rank(self.group, self.process)
            except ValueError:
                raise ValueError(
                    "the process group of cp_context must be alive, but it was destroyed: build "
                    "the context again with build_cp_context"
                ) from None

    def check_local_tokens(self, tokens: int) -> None:
        """Raises ValueError unless this rank holds that many tokens."""
        if tokens != self.local_tokens:
            refuse_length(tokens, self.local_tokens, self.total_tokens)

    def before(self, call: str, **facts: object) -> None:
        """Compares the ranks if that is due; see comm/agreement.py. call, facts: what is called,
        and with which sizes. A recomputation exchanges nothing, so it compares nothing."""
        if self.agreement is None or torch.compiler.is_compiling():
            return
        if self.agreement.due and not remat.recomputing():
            self.agreement.before(call, **facts)

    def repeated(self, n: int) -> FLACPContext:
        """The same sharding for a batch that has n rows for each token. It is built at the first
        call and kept. Under torch.compile it cannot be built: call this once before the compiled
        function, or it raises ValueError."""
        if n in self._repeated:
            return self._repeated[n]
        if torch.compiler.is_compiling():
            raise ValueError(
                f"under torch.compile, {n} householder steps under a cp_context need "
                f"cp_context.repeated({n}) to be called once before the compiled function"
            )
        check_count("n", n)
        offsets = _times(n, self.global_cu_seqlens)
        ranges = tuple(tuple((n * a, n * b) for a, b in r) for r in self.token_ranges)
        given = offsets, ranges, None, self.exchange, self.cu_seqlens.device, self.max_sequences
        self._repeated[n] = _context(self.group, *given, checked=self.agreement is not None)
        return self._repeated[n]

    @cached_property
    def plans(self) -> Tabled:
        """Keeps the plans of calls under this context. The packing must not keep them: plans hold
        the packing and the group, and the group would then live on until Python collects reference
        cycles."""
        return Tabled()

    def in_chunks(self, size: int) -> Packing:
        """The packing in chunks of so many tokens, which is made once; `packing` has 64."""
        if size == self.packing.chunk:
            return self.packing
        if size not in self._packings:
            where = self.token_ranges, self.rank, self.max_sequences
            self._packings[size] = packing_on(self.global_cu_seqlens, *where, size)
        return self._packings[size]

    def framed(self, packing: Packing) -> Packing | None:
        """A packing of `in_chunks` with a frame, if calls that need no exact packing can use one;
        see `fla_cp.partition.on_ranks.framed`."""
        where = self.global_cu_seqlens, self.token_ranges, self.rank
        return packing.cached("framed", lambda: framed(packing, *where))

    def update(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> None:
        """Makes this the context of another packing of the same number of tokens, so that a CUDA
        graph that was captured under it can be replayed on that packing.

        cu_seqlens: as for `build_cp_context`, equal on all ranks, with at most max_sequences
            sequences. cu_seqlens_cpu: the same on the host; it saves one device synchronisation.
        Every tensor that kernels read keeps its shape and address. It is written on the current
        stream, on which the graph must then be replayed; the host does not wait. Do not call it
        between a forward and its backward, or while a graph captured under the context runs on
        another stream.
        It is a collective, which compares the ranks as the first call under a context does. Over
        NCCL, a later call over the group raises the error.
        Raises ValueError without max_sequences, for another number of tokens, for too many
        sequences, for offsets that `build_cp_context` refuses, for a group that was destroyed, and
        if ranks differ. The context then stays as it was.
        """
        self.check_alive()
        offsets = _read(cu_seqlens, cu_seqlens_cpu)
        if self.agreement is not None and self.max_sequences is not None:
            names = self.token_ranges, self.conv1d_kernel_size, self.exchange, self.max_sequences
            self.agreement.changed(_facts(offsets, *names))
        _check_update(self, offsets)
        self._refill(offsets)

    def _refill(self, offsets: tuple[int, ...]) -> None:
        """Does what `update` does after its checks, for repeated contexts, too."""
        where = self.token_ranges, self.rank, self.max_sequences
        packing, links = layout(offsets, *where)
        packing.take_tables(self.packing)
        links.take_tables(self.links)
        links.mirrored().take_tables(self.links.mirrored())
        cu_local = to_device(packing.offsets, torch.int32, "cpu")
        fill(self.cu_seqlens, cu_local)
        changed = {
            "packing": packing,
            "links": links,
            "cu_seqlens_cpu": cu_local,
            "global_cu_seqlens": padded(offsets, self.max_sequences),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        self.__dict__.pop("plans", None)
        self.take_tables(self)
        if (keys := self._cache.get(KeyTables)) is not None:
            keys.lengths.fill(self.global_cu_seqlens)
        for size, before in self._packings.items():
            self._packings[size] = packing_on(offsets, *where, size)
            self._packings[size].take_tables(before)
        for n, context in self._repeated.items():
            context._refill(_times(n, offsets))

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a global tensor, in local order.

        x: its dimension `dim` has length total_tokens. With dim=1 it may also be [B, T, ...] with
        B*T == total_tokens: its rows are then joined, and the result is [1, local_tokens, ...].
        Differentiable: the gradient of x has this rank's tokens, and zeros elsewhere.
        Raises ValueError for another shape and for a group that was destroyed.
        """
        self.check_alive()
        rows = dim == 1 and getattr(x, "ndim", 0) > 1 and x.shape[0] > 1
        if rows and x.shape[0] * x.shape[1] == self.total_tokens:
            x = x.flatten(0, 1).unsqueeze(0)
        if length_in(x, dim) != self.total_tokens:
            raise ValueError(
                f"x must have total_tokens={self.total_tokens} tokens in dim {dim}, "
                f"got shape {tuple(x.shape)}"
            )
        return self._own(x, dim)

    def _own(self, x: Tensor, dim: int) -> Tensor:
        """`shard` of a tensor whose dimension `dim` has all tokens."""
        pieces = [x.narrow(dim, lo, hi - lo) for lo, hi in self.token_ranges[self.rank]]
        return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The global tensor from every rank's local tokens: the inverse of `shard`.

        A collective. Differentiable, on the assumption that every rank computes the same from the
        result: the gradient of x is this rank's part of the result's gradient.
        Raises ValueError for another shape, for a group that was destroyed, and if ranks differ.
        """
        self.check_alive()
        if length_in(x, dim) != self.local_tokens:
            raise ValueError(
                f"x must have local_tokens={self.local_tokens} tokens in dim {dim}, "
                f"got shape {tuple(x.shape)}"
            )
        others = [n for d, n in enumerate(x.shape) if d != dim % x.ndim]
        self.before("unshard", size=math.prod(others), dtype=x.dtype)
        result: Tensor = _Unshard.apply(x, self, dim)
        return result


_NAMES = {
    (False, "k"): "chunk_kda",
    (True, "k"): "chunk_gated_delta_rule",
    (True, "p"): "chunk_comba",
    (False, "p"): "chunk_dplr_delta_rule",
    (False, "none"): "chunk_gla",
    (True, "none"): "chunk_simple_gla",
}


def compare_ranks(
    context: FLACPContext,
    rule: DeltaRule,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    initial: Tensor | None,
    want_final: bool = False,
) -> None:
    """Compares, if that is due, whether the ranks agree on what decides how much a call sends.
    shape: (HV, K, V)."""
    if context.agreement is not None and context.agreement.due and not remat.recomputing():
        facts = dict(zip(("HV", "K", "V"), shape, strict=True), dtype=dtype)
        facts |= {**Agreement.of_initial(initial), "output_final_state": want_final}
        context.agreement.before(_NAMES[rule.per_head, rule.removal], **facts)


# FSDP2 copies every dataclass among a module's arguments, with everything in it, at every call.
del FLACPContext.__dataclass_fields__


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: FLACPContext, dim: int) -> Tensor:
        ctx.context, ctx.dim = context, dim
        lengths = [sum(hi - lo for lo, hi in ranges) for ranges in context.token_ranges]
        rows = x.movedim(dim, 0)
        mine = rows.new_zeros(max(lengths), *rows.shape[1:])
        mine[: len(rows)] = rows
        if context.group is None:
            gathered = mine[None]
        else:
            # As bytes, because transports do not know every dtype.
            wire = mine.flatten().view(torch.uint8)
            wire = wire.to(collectives.wire_device(context.group, mine.device))
            gathered, work = collectives.all_gather(wire, context.group)
            work.wait()
            gathered = gathered.to(mine.device).flatten().view(mine.dtype)
            gathered = gathered.view(context.world_size, *mine.shape)
        out = rows.new_empty(context.total_tokens, *rows.shape[1:])
        for ranges, part in zip(context.token_ranges, gathered, strict=True):
            at = 0
            for lo, hi in ranges:
                out[lo:hi] = part[at : at + hi - lo]
                at += hi - lo
        # Detached, because autograd does not let the caller change a Function's view in place.
        return out.movedim(0, dim).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.context._own(grad, ctx.dim), None, None


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup | None,
    *,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    token_ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
    exchange: str = "auto",
    max_sequences: int | None = None,
    check: bool | None = None,
) -> FLACPContext:
    """The sharding of one batch over `group`.

    cu_seqlens: offsets of the GLOBAL batch's sequences, int32 or int64 [N+1], from 0 to the
        number of tokens; equal on all ranks. Rows of equal length T are `arange(0, B*T+1, T)`.
    group: process group, or None for one rank.
    conv1d_kernel_size: W of the causal convolutions that will run under the context.
    cu_seqlens_cpu: the same values on the host; saves one device synchronisation.
    token_ranges: for each rank its [start, stop) ranges in local order. Together they must cover
        every token of the batch once. By default each rank has one range, and their lengths differ
        by at most one token. See `zigzag_token_ranges` for another division.
    exchange: "auto", "all_gather", "ring", "scan", "heads" or, for GPUs of one host that can read
        each other's memory, "symmetric". docs/choosing.md says which one to choose.
    max_sequences: makes a context of fixed shape, for CUDA graphs: `FLACPContext.update` fills it
        with another packing of the same number of tokens and at most that many sequences. Such a
        context needs contiguous ranges of at least one token and "auto", "all_gather" or
        "symmetric". It always exchanges states, cuts no segments inside a GPU, and supports neither
        initial or final states nor torch.compile.
    check: when the ranks compare their tables, in one small collective: at the first call under the
        context (None), in this function (True) or never (False). It must be equal on all ranks.
        With None and True the first calls over a group are compared as well (comm/agreement.py).

    Raises ValueError for arguments that are not as above, for a group that was destroyed or does
    not contain this process, for what max_sequences does not support, for "symmetric" if the group
    cannot have it, and, with check=True, if ranks differ.
    """
    offsets = _read(cu_seqlens, cu_seqlens_cpu)
    check_conv1d_kernel_size(conv1d_kernel_size)
    world_size = check_group(group)
    check_exchange(exchange)
    check_flags(("check",), () if check is None else (check,))
    if max_sequences is not None:
        check_max_sequences(max_sequences, offsets, world_size, token_ranges, exchange)
        max_sequences = int(max_sequences)
    if conv1d_kernel_size is not None:
        conv1d_kernel_size = int(conv1d_kernel_size)
    if token_ranges is None:
        token_ranges = contiguous_token_ranges(offsets[-1], world_size)
    ranges = token_ranges_of(token_ranges)
    check_token_ranges(ranges, offsets[-1], world_size)

    tokens = max(sum(hi - lo for lo, hi in r) for r in ranges)
    fixed = max_sequences is not None
    scheme = make_exchange(exchange, group, world_size, fixed=fixed, tokens=tokens)
    device = cu_seqlens.device
    given = offsets, ranges, conv1d_kernel_size, scheme, device, max_sequences
    context = _context(group, *given, checked=check is not False)
    if check and context.agreement is not None:
        context.agreement.built()
    return context


def _read(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> tuple[int, ...]:
    """The offsets, checked."""
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        check_host_copy(cu_seqlens, cu_seqlens_cpu)
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets)
    return offsets


def _times(n: int, offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n * x for x in offsets)


def _context(
    group: dist.ProcessGroup | None,
    offsets: tuple[int, ...],
    ranges: tuple[Ranges, ...],
    conv1d_kernel_size: int | None,
    exchange: Exchange,
    device: torch.device,
    max_sequences: int | None = None,
    *,
    checked: bool = False,
) -> FLACPContext:
    """The context, from arguments that were checked before. checked: whether ranks compare their
    tables."""
    rank, world_size = 0 if group is None else dist.get_rank(group), len(ranges)
    packing, links = layout(offsets, ranges, rank, max_sequences)
    width = (conv1d_kernel_size or 1) - 1
    # With a fixed shape, what is sent must not depend on the packing: the halo is that of a single
    # sequence.
    sequences = offsets if max_sequences is None else (0, offsets[-1])
    agreement = None
    if checked and group is not None and world_size > 1:
        agreement = Agreement(
            group, _facts(offsets, ranges, conv1d_kernel_size, exchange, max_sequences)
        )
    return FLACPContext(
        group=group,
        rank=rank,
        world_size=world_size,
        cu_seqlens=to_device(packing.offsets, torch.int32, device),
        cu_seqlens_cpu=to_device(packing.offsets, torch.int32, "cpu"),
        global_cu_seqlens=padded(offsets, max_sequences),
        local_tokens=packing.tokens,
        token_ranges=ranges,
        conv1d_kernel_size=conv1d_kernel_size,
        packing=packing,
        links=links,
        exchange=exchange,
        halo=Halo.build(sequences, ranges, rank, width) if width else None,
        max_sequences=max_sequences,
        agreement=agreement,
    )


def _facts(
    offsets: tuple[int, ...],
    ranges: tuple[Ranges, ...],
    conv1d_kernel_size: int | None,
    exchange: Exchange,
    max_sequences: int | None,
) -> dict[str, object]:
    """The facts of a context that ranks compare."""
    return {
        "cu_seqlens": offsets,
        "token_ranges": tuple(n for r in ranges for n in (len(r), *chain(*r))),
        "conv1d_kernel_size": conv1d_kernel_size or 0,
        "exchange": scheme_of(exchange),
        "max_sequences": max_sequences or 0,
    }


def _check_update(context: FLACPContext, offsets: Sequence[int]) -> None:
    """Checks that a context of fixed shape can take another packing."""
    if context.max_sequences is None:
        raise ValueError("update needs a context built with max_sequences, got max_sequences=None")
    if offsets[-1] != context.total_tokens:
        raise ValueError(
            f"cu_seqlens must end at the context's total_tokens={context.total_tokens}, "
            f"got {offsets[-1]}"
        )
    check_sequences_fit(context.max_sequences, offsets)
