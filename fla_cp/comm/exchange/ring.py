"""Ring: states travel from rank to rank, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, fold, leave, row_of
from fla_cp.comm.exchange.base import Pending, SlotMaps, Waiting
from fla_cp.partition.slots import Links


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
        return Waiting(steps.finish, maps.offset.device)


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
