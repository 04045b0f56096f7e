"""PrefixScan: maps are composed over ranks in log2 steps."""

from collections.abc import Generator

import torch
import torch.distributed as dist

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, leave, product, row_of
from fla_cp.comm.exchange.base import GroupExchange, Rounds, SlotMaps, unpack
from fla_cp.partition.slots import Links


class PrefixScan(GroupExchange):
    """Prefix composition in ceil(log2 n) rounds (Hillis and Steele), for many ranks.

    After round d, the map of each slot spans the 2^d slots up to it, or all slots since its
    sequence began. A map that spans all of them receives no state, so only its offset is sent from
    then on.
    """

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        spans: dict[int, SlotMaps] = {}  # for each own slot, the map that spans slots up to it
        for s in links.slots_of(dist.get_rank(self.group)):
            row = links.row[s]
            transition = row_of(maps.transition, row) if links.through[s] else None
            spans[s] = SlotMaps(transition, maps.offset[row])

        depth = _chain_depth(links)
        distance = 1
        while wanted := [s for s, d in enumerate(depth) if d >= distance]:
            complete = [d < distance for d in depth]  # the map spans its whole sequence so far
            pairs = [(s - distance, s) for s in wanted]
            got = yield from self._send(links, pairs, spans, complete)
            for s in spans:
                if s not in got:
                    continue
                (M, B, _), before = spans[s], got[s]
                assert M is not None
                B = leave(M, B, before.offset)
                M = None if before.transition is None else product(M, before.transition)
                spans[s] = SlotMaps(M, B)
            distance *= 2

        pairs = [(s - 1, s) for s in range(1, links.count) if links.continues[s]]
        got = yield from self._send(links, pairs, spans, [True] * links.count)
        entering = torch.zeros_like(maps.offset)
        for s, before in got.items():
            entering[links.row[s]] = before.offset
        yield entering

    def _send(
        self,
        links: Links,
        pairs: list[tuple[int, int]],
        spans: dict[int, SlotMaps],
        offset_only: list[bool],
    ) -> Generator[None, None, dict[int, SlotMaps]]:
        """Sends the map of slot a to slot b for each pair (a, b). Returns the map that came for
        each of this rank's slots. offset_only: for which slots a no transition is sent."""
        got: dict[int, SlotMaps] = {}
        # `sends` keeps the tensors alive: the transport may read them until the works are done.
        sends, receives, buffers = [], [], {}
        for a, b in pairs:
            if a in spans:
                M, B = None if offset_only[a] else spans[a].transition, spans[a].offset
                if b in spans:
                    got[b] = SlotMaps(M, B)
                    continue
                wire = B if M is None else torch.cat([B, M], -1)
                sends.append((wire.contiguous(), links.owner[b]))
            elif b in spans:
                HV, K, V = spans[b].offset.shape
                buffers[b] = spans[b].offset.new_empty(HV, K, V if offset_only[a] else V + K)
                receives.append((buffers[b], links.owner[a]))
        works = collectives.send_and_receive(sends, receives, self.group)
        yield
        for work in works:
            work.wait()
        for b, wire in buffers.items():
            V = spans[b].offset.shape[-1]
            got[b] = unpack(wire, V)
        return got


def _chain_depth(links: Links) -> list[int]:
    """For each slot, how many slots before it the state that leaves it depends on."""
    depth: list[int] = []
    for through in links.through:
        depth.append(depth[-1] + 1 if through else 0)
    return depth
