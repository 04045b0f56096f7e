"""Passing states between ranks, one map a token range and never tokens: all schemes, hence long.

Terms. A slot is a token range of the global batch; slots are numbered in sequence order and
each belongs to one rank. The state leaving slot s and entering slot s+1 is

    out[s] = offset[s] + transition[s] @ in[s]        in[s+1] = out[s] if slot s+1 continues

where the transition counts only if one sequence passes through the whole slot. Every scheme
below takes the maps of this rank's slots and returns the states that enter them; a backward
pass uses the same schemes over `Links.mirrored()`. What a rank receives per layer and
direction, in units of S = HV*K*V*4 bytes and M = HV*K*K*4 bytes:

    Local       nothing                                   one rank
    AllGather   (R-1) (S + M)                1 step       default up to 8 ranks
    Ring        S                            R-1 steps    fewest bytes, longest chain
    Scan        ceil(log2(R-1)) (S + M) + S  log2 steps   default beyond 128 ranks
    Heads       (R-1)/R (2 S + M)            2 steps      default from 9 to 128 ranks
    Symmetric   (R-1) S + (R-2) M            1 step       ranks of one host, GPUs that read peers;
                                                          default for them from 8192 tokens a rank

With fewer heads than ranks, Heads receives (R-1)/HV (S + M) + (R-1)/R S. M is not sent where no
slot is passed through (two ranks, or documents shorter than a range).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives, peer_memory
from fla_cp.comm.affine import Fold, FoldTable, Steps, fold, leave, product, row_of
from fla_cp.comm.timing import exchange_wait
from fla_cp.partition.device_tables import Tabled


class SlotMaps(NamedTuple):
    """Maps of this rank's slots: transition [J, HV, K, K] (or None) and offset [J, HV, K, V]. wire:
    what `pack` would make of them, if they are its slices."""

    transition: Tensor | None
    offset: Tensor
    wire: Tensor | None = None


@dataclass(frozen=True)
class Links(Tabled):
    """Which slot belongs to whom and which continues its predecessor; equal on all ranks.

    owner, row: rank of each slot, and its index among that rank's ranges. continues: slot s goes
    on where slot s-1 stopped. through: one sequence enters, fills and leaves slot s.
    slots_per_rank: largest number of ranges that a rank owns. fixed: one slot a rank, and what is
    exchanged does not depend on the rest.
    """

    owner: tuple[int, ...]
    row: tuple[int, ...]
    continues: tuple[bool, ...]
    through: tuple[bool, ...]
    slots_per_rank: int
    fixed: bool = False

    @property
    def count(self) -> int:
        return len(self.owner)

    @cached_property
    def any(self) -> bool:
        """Whether any sequence crosses from one slot to the next."""
        return any(self.continues) or (self.fixed and self.count > 1)

    @cached_property
    def any_through(self) -> bool:
        """Whether any transition is needed."""
        return any(self.through) or (self.fixed and self.count > 2)

    def feeds(self, s: int) -> bool:
        """Whether slot s hands its state to slot s+1."""
        return s + 1 < self.count and self.continues[s + 1]

    def slots_of(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self.owner) if r == rank]

    def mirrored(self) -> Links:
        """The table seen from the end: for gradients, which walk from later slots to earlier."""
        return self._mirror

    @cached_property
    def _mirror(self) -> Links:
        return Links(
            owner=self.owner[::-1],
            row=self.row[::-1],
            continues=(False, *self.continues[:0:-1]),
            through=self.through[::-1],
            slots_per_rank=self.slots_per_rank,
            fixed=self.fixed,
        )


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """States [J, HV, K, V] entering this rank's slots, zero where nothing enters."""
        ...


class Exchange(Protocol):
    """A scheme. `start` returns at once; work that needs no state may run before `wait`. walk: the
    backend's, for schemes that fold gathered maps."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending: ...


class _Waiting:
    """A `Pending` whose remaining work is a function, timed as exposed exchange."""

    def __init__(self, finish: Callable[[], Tensor], device: torch.device):
        self._finish, self._device = finish, device

    def wait(self) -> Tensor:
        with exchange_wait(self._device):
            return self._finish()


_Chain = list[tuple[int, int, int]]


@functools.cache
def _entering(rank: int, rows: int) -> Steps:
    """The walk through all maps that gives the states entering the `rows` ranges of `rank`: all of
    them, zero where nothing enters. A map's row is its rank's times slots_per_rank plus its own."""

    def steps(links: Links) -> FoldTable:
        found: list[_Chain] = []
        chain: _Chain = []  # since the last slot that nothing passes through
        used, zero = 0, set(range(rows))  # steps up to the last slot here; ranges not entered
        for s in range(links.count):
            if links.owner[s] == rank and links.continues[s]:
                chain[-1] = (*chain[-1][:2], links.row[s])
                used = len(chain)
                zero.discard(links.row[s])
            if not links.through[s]:
                found, chain, used = found + [chain[:used]] * (used > 0), [], 0
            if links.feeds(s):
                row = links.owner[s] * links.slots_per_rank + links.row[s]
                chain.append((row if links.through[s] else -1, row, -1))
        found += [chain[:used]] * (used > 0)
        found += [[(-1, -1, row)] for row in sorted(zero)]
        if links.fixed:  # as many steps as slots before this one, one at least: zeros first
            least = max(1, links.owner.index(rank))
            found = [[(-1, -1, -1)] * (least - len(found[0])) + found[0]]
        return FoldTable.of([(-1, -1, chain) for chain in found])

    return steps


def _fold(maps: SlotMaps, links: Links, rank: int, like: Tensor, fold: Fold) -> Tensor:
    """States entering the ranges of `rank`, like [J, HV, K, V], from the maps of all."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    steps = _entering(rank, len(like))
    return fold(links, steps, maps.transition, maps.offset, None, out, transposed=False)


@dataclass(frozen=True)
class Local:
    """One rank holds all slots; nothing is sent."""

    group: dist.ProcessGroup | None = None

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        def finish() -> Tensor:
            return _fold(maps, links, 0, maps.offset, fold)

        return _Waiting(finish, maps.offset.device)


@dataclass(frozen=True)
class AllGather:
    """Every rank receives every map in one collective and folds those before its own slots."""

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        rank = dist.get_rank(self.group)
        wire = pack(maps, links)
        gathered, work = collectives.all_gather(wire, self.group)

        def finish() -> Tensor:
            work.wait()
            return fold_wires(gathered, links, rank, maps.offset, fold)

        return _Waiting(finish, wire.device)


@dataclass(frozen=True)
class Symmetric:
    """Every rank puts its maps where its peers can read them, and reads from theirs those that its
    fold needs (peers.py).

    Each map is read once, into local memory, while other work may run; the fold would read a
    transition for every tile of values.
    """

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        J, HV, K, V = maps.offset.shape
        S, M, slots = HV * K * V, HV * K * K, links.slots_per_rank
        rank = dist.get_rank(self.group)
        transitions, offsets = links.cached((_read, rank, J), lambda: _read(links, rank, J))
        # room for transitions even where none is sent: another size later would make hosts wait
        memory = peer_memory.peer_memory(self.group, slots * (S + M), maps.offset.dtype)
        got = maps.offset.new_empty(len(offsets) * S + len(transitions) * M)

        def put(mine: Tensor) -> None:
            mine[: J * S].view(J, HV, K, V).copy_(maps.offset)
            if links.any_through and maps.transition is not None:
                mine[slots * S :][: J * M].view(J, HV, K, K).copy_(maps.transition)

        def take(parts: tuple[Tensor, ...]) -> None:
            found = [parts[row // slots].narrow(0, row % slots * S, S) for row in offsets]
            for row in transitions:
                found.append(parts[row // slots].narrow(0, slots * S + row % slots * M, M))
            if len(found) == 1:  # torch would leave one tensor to the driver's copy
                found = list(found[0].chunk(2))
            if found:
                torch.cat(found, out=got)

        arrived = memory.exchange(put, take)

        def finish() -> Tensor:
            arrived()
            B = got[: len(offsets) * S].view(-1, HV, K, V) if offsets else None
            M_ = got[len(offsets) * S :].view(-1, HV, K, K) if transitions else None
            out = torch.empty_like(maps.offset, memory_format=torch.contiguous_format)
            return fold(links, _entering_read(rank, J), M_, B, None, out, transposed=False)

        return _Waiting(finish, maps.offset.device)


@dataclass(frozen=True)
class Nearest:
    """Symmetric where the group can have it, else AllGather. It finds out in the first exchange,
    which all ranks start alike, not in a context's making, which may run on a thread of its own. A
    first exchange that a CUDA graph captures gathers."""

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        known = peer_memory.known(self.group) or not torch.cuda.is_current_stream_capturing()
        able = known and not peer_memory.why_not(self.group)
        scheme = Symmetric(self.group) if able else AllGather(self.group)
        return scheme.start(maps, links, fold)


def _read(links: Links, rank: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of transitions and of offsets, counted as by `_entering`, that its walk reads."""
    if links.fixed:  # whatever the packing
        before = links.owner[: links.owner.index(rank)]
        return before[1:], before
    walked = _entering(rank, rows)(links)
    transitions, offsets = (tuple(sorted({*x} - {-1})) for x in (walked.transition, walked.offset))
    return transitions, offsets


@functools.cache
def _entering_read(rank: int, rows: int) -> Steps:
    """The walk of `_entering` through the maps of `_read` alone."""

    def steps(links: Links) -> FoldTable:
        walked = _entering(rank, rows)(links)
        transition, offset = (
            {row: n for n, row in enumerate((-1, *read), -1)} for read in _read(links, rank, rows)
        )
        return walked._replace(
            transition=tuple(transition[row] for row in walked.transition),
            offset=tuple(offset[row] for row in walked.offset),
        )

    return steps


def fold_wires(wires: Tensor, links: Links, rank: int, like: Tensor, fold: Fold = fold) -> Tensor:
    """States entering the slots of `rank`, like [J, HV, K, V], from the wires of all ranks (`pack`)
    [R, slots_per_rank, ..]."""
    maps = unpacked(wires.flatten(0, 1), links, like.shape[-1])
    return _fold(maps, links, rank, like, fold)


def unpacked(wire: Tensor, links: Links, V: int) -> SlotMaps:
    """The maps of some rows of a wire."""
    return SlotMaps(wire[..., V:] if links.any_through else None, wire[..., :V])


def wire_shape(links: Links, HV: int, K: int, V: int) -> tuple[int, int, int, int]:
    """What `pack` returns is of this shape."""
    return links.slots_per_rank, HV, K, V + K * links.any_through


def pack(maps: SlotMaps, links: Links) -> Tensor:
    """This rank's wire [slots_per_rank, HV, K, V+K], +K only where any transition is needed."""
    if maps.wire is not None:
        return maps.wire
    J, HV, K, V = maps.offset.shape
    sent = (maps.offset, maps.transition) if links.any_through else (maps.offset,)
    parts = [x for x in sent if x is not None]
    if links.slots_per_rank == J and len(parts) == len(sent):
        return torch.cat(parts, -1)
    wire = maps.offset.new_zeros(wire_shape(links, HV, K, V))
    wire[:J, ..., :V] = maps.offset
    if links.any_through and maps.transition is not None:
        wire[:J, ..., V:] = maps.transition
    return wire


@dataclass(frozen=True)
class Ring:
    """States go from slot to slot, each rank applying its own map: fewest bytes, serial.

    Every rank performs its sends and receives in slot order, so that no two ranks wait for
    each other. Over NCCL, messages must not be the first that a group does unless it was made with
    device_id: ranks without a neighbour send none.
    """

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        steps = _RingSteps(self.group, maps, links)
        steps.run(until_state_needed=True)
        return _Waiting(steps.finish, maps.offset.device)


class _RingSteps:
    def __init__(self, group: dist.ProcessGroup, maps: SlotMaps, links: Links):
        self.group, self.maps, self.links = group, maps, links
        self.rank = dist.get_rank(group)
        self.entering = torch.zeros_like(maps.offset)
        self.slots = links.slots_of(self.rank)
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.receives: dict[int, dist.Work] = {}
        self.at = 0

    def run(self, until_state_needed: bool = False) -> None:
        """Goes on slot by slot; with the flag, stops before it would have to wait."""
        links = self.links
        while self.at < len(self.slots):
            s = self.slots[self.at]
            row = links.row[s]
            if links.continues[s] and s not in self.receives and links.owner[s - 1] != self.rank:
                self.receives[s] = collectives.receive(
                    self.entering[row], links.owner[s - 1], self.group
                )
            if links.feeds(s):
                if links.through[s]:
                    if until_state_needed:
                        return
                    if s in self.receives:
                        self.receives.pop(s).wait()
                    out = leave(
                        row_of(self.maps.transition, row), self.maps.offset[row], self.entering[row]
                    )
                else:
                    out = self.maps.offset[row].contiguous()
                if links.owner[s + 1] == self.rank:
                    self.entering[links.row[s + 1]] = out
                else:
                    work = collectives.send(out, links.owner[s + 1], self.group)
                    self.sends.append((work, out))
            self.at += 1

    def finish(self) -> Tensor:
        self.run()
        for work in [*self.receives.values(), *(work for work, _ in self.sends)]:
            work.wait()
        return self.entering


@dataclass(frozen=True)
class PrefixScan:
    """Prefix composition in ceil(log2 n) rounds (Hillis and Steele), for many ranks.

    After round d every slot's map spans the 2^d slots up to it, or all back to where its
    sequence began; from then on only its offset is sent.
    """

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        rounds = self._rounds(maps, links)
        next(rounds)  # the first messages leave now

        def finish() -> Tensor:
            *_, entering = rounds
            assert entering is not None
            return entering

        return _Waiting(finish, maps.offset.device)

    def _rounds(self, maps: SlotMaps, links: Links) -> Iterator[Tensor | None]:
        """Yields None whenever messages are under way, and the entering states at last."""
        rank = dist.get_rank(self.group)
        own = links.slots_of(rank)
        depth = _chain_depth(links)
        offset = {s: maps.offset[links.row[s]] for s in own}
        transition = {s: row_of(maps.transition, links.row[s]) for s in own if links.through[s]}

        distance = 1
        while wanted := [s for s, d in enumerate(depth) if d >= distance]:
            reaches = [d < distance for d in depth]  # nothing enters what the map spans
            collect = self._post(
                links, rank, [(s - distance, s) for s in wanted], offset, transition, reaches
            )
            yield None
            got = collect()
            for s in own:
                if s not in got:
                    continue
                before, M = got[s], transition[s]
                assert M is not None
                offset[s] = leave(M, offset[s], before.offset)
                transition[s] = None if before.transition is None else product(M, before.transition)
            distance *= 2

        complete = [True] * links.count
        pairs = [(s - 1, s) for s in range(1, links.count) if links.continues[s]]
        collect = self._post(links, rank, pairs, offset, transition, complete)
        yield None
        got = collect()
        entering = torch.zeros_like(maps.offset)
        for s, before in got.items():
            entering[links.row[s]] = before.offset
        yield entering

    def _post(
        self,
        links: Links,
        rank: int,
        pairs: list[tuple[int, int]],
        offset: dict[int, Tensor],
        transition: dict[int, Tensor | None],
        offset_only: list[bool],
    ) -> Callable[[], dict[int, SlotMaps]]:
        """Starts to send the map of slot a to slot b for each pair (a, b); the function returned
        waits and gives what came, by slot."""
        got: dict[int, SlotMaps] = {}
        sends, receives, buffers = [], [], {}
        example = next(iter(offset.values()), None)
        for a, b in pairs:
            if links.owner[a] == rank:
                M = None if offset_only[a] else transition[a]
                if links.owner[b] == rank:
                    got[b] = SlotMaps(M, offset[a])
                    continue
                wire = offset[a] if M is None else torch.cat([offset[a], M], -1)
                sends.append((wire.contiguous(), links.owner[b]))
            elif links.owner[b] == rank:
                assert example is not None
                HV, K, V = example.shape
                buffers[b] = example.new_empty(HV, K, V if offset_only[a] else V + K)
                receives.append((buffers[b], links.owner[a]))
        works = collectives.send_and_receive(sends, receives, self.group)

        def collect() -> dict[int, SlotMaps]:
            for work in works:
                work.wait()
            sends.clear()  # until here the transport may still read them
            for b, x in buffers.items():
                V = offset[b].shape[-1]
                got[b] = SlotMaps(x[..., V:] if x.shape[-1] > V else None, x[..., :V])
            return got

        return collect


@dataclass(frozen=True)
class ByHeads:
    """Each rank folds the maps of all ranks for its share of the heads, and sends every rank the
    states that enter its slots: two all-to-alls."""

    group: dist.ProcessGroup

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        wire = pack(maps, links).transpose(0, 1)  # heads first
        _, HV, K, V = maps.offset.shape
        R, rank, J = dist.get_world_size(self.group), dist.get_rank(self.group), wire.shape[1]
        edges = [HV * r // R for r in range(R + 1)]
        shares = [hi - lo for lo, hi in pairwise(edges)]
        mine = [shares[rank]] * R
        got, work = collectives.all_to_all(wire.flatten(1), shares, mine, self.group)

        def finish() -> Tensor:
            work.wait()
            wires = got.view(R, shares[rank], J, K, wire.shape[-1]).transpose(1, 2)
            states = wires.new_zeros(R, J, shares[rank], K, V)
            state: Tensor | None = None
            for s, (owner, row) in enumerate(zip(links.owner, links.row, strict=True)):
                if state is not None and links.continues[s]:
                    states[owner, row] = state
                if links.feeds(s):
                    one = unpacked(wires[owner, row], links, V)
                    M = one.transition if links.through[s] else None
                    state = leave(M, one.offset, state)
            back = states.transpose(1, 2).reshape(R * shares[rank], J * K * V)
            heads, work_back = collectives.all_to_all(back, mine, shares, self.group)
            work_back.wait()
            entering = heads.view(HV, J, K, V).transpose(0, 1)
            return entering[: len(maps.offset)].contiguous()

        return _Waiting(finish, wire.device)


def scheme_of(exchange: Exchange) -> str:
    """The name of an exchange in `SCHEMES`; others, which only "auto" takes, by class."""
    names = {kind: name for name, kind in SCHEMES.items()}
    return names.get(type(exchange), type(exchange).__name__.lower())


def _chain_depth(links: Links) -> list[int]:
    """How many slots back the state leaving each slot depends on."""
    depth: list[int] = []
    for s in range(links.count):
        depth.append(depth[-1] + 1 if links.through[s] else 0)
    return depth


SCHEMES: dict[str, Callable[[dist.ProcessGroup], Exchange]] = {
    "all_gather": AllGather,
    "ring": Ring,
    "scan": PrefixScan,
    "heads": ByHeads,
    "symmetric": Symmetric,
}
ALL_GATHER_RANKS, HEADS_RANKS = 8, 128
"""Largest world sizes for which "auto" gathers all maps, and for which it deals them by heads;
beyond them the logarithmic scan. From the model in docs/design.md, with 32 heads."""


SYMMETRIC_TOKENS = 8192
"""Tokens of the largest rank from which "auto" reads peers' memory, where the group can. Its small
kernels find room beside scans that fill the card, where a collective waits for their end; that is
no matter with few tokens, and fewer were not measured (docs/design.md has the figures)."""


def make_exchange(
    scheme: str,
    group: dist.ProcessGroup | None,
    world_size: int,
    *,
    fixed: bool = False,
    tokens: int = 0,
) -> Exchange:
    """The exchange object for `scheme` ("auto", or a key of `SCHEMES`). fixed: for links that are,
    whose maps "auto" gathers whatever the size. tokens: of the largest rank.

    For "symmetric" a collective at the first call for a group. Raises ValueError for an unknown
    scheme and, on all ranks, where the group cannot have symmetric memory.
    """
    if scheme != "auto" and scheme not in SCHEMES:
        raise ValueError(f"exchange must be one of {['auto', *SCHEMES]}, got {scheme!r}")
    if group is None or world_size == 1:
        return Local()
    if scheme == "auto":
        if world_size <= ALL_GATHER_RANKS or fixed:
            return Nearest(group) if tokens >= SYMMETRIC_TOKENS else AllGather(group)
        scheme = "heads" if world_size <= HEADS_RANKS else "scan"
    elif scheme == "symmetric" and (reason := peer_memory.why_not(group)):
        raise ValueError(f"exchange='symmetric' cannot be used here: {reason}; pass 'auto'")
    return SCHEMES[scheme](group)
