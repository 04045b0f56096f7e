"""PrefixScan: maps are composed over ranks in log2 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, fold, leave, product, row_of
from fla_cp.comm.exchange.base import Pending, SlotMaps, Waiting
from fla_cp.partition.slots import Links


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

        return Waiting(finish, maps.offset.device)

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


def _chain_depth(links: Links) -> list[int]:
    """How many slots back the state leaving each slot depends on."""
    depth: list[int] = []
    for s in range(links.count):
        depth.append(depth[-1] + 1 if links.through[s] else 0)
    return depth
