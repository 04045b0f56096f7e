"""Ring: states travel from rank to rank, one after the other."""

from itertools import chain

import torch
import torch.distributed as dist

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, leave, row_of
from fla_cp.comm.exchange.base import GroupExchange, Rounds, SlotMaps
from fla_cp.partition.slots import Links


class Ring(GroupExchange):
    """States go from slot to slot, and each rank applies its own map. This has the fewest bytes,
    but is serial.

    Every rank sends and receives in the order of slots, so that no two ranks wait for each other.
    Over NCCL, these messages must not be the first communication of a group, because ranks without
    a neighbour take no part in them, unless the group was made with device_id.
    """

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        rank, owner = dist.get_rank(self.group), links.owner
        entering = torch.zeros_like(maps.offset)
        sends, receives = [], {}
        for s in links.slots_of(rank):
            row = links.row[s]
            if links.continues[s] and owner[s - 1] != rank:
                buffer = entering[row], owner[s - 1]
                receives[s] = collectives.send_and_receive([], [buffer], self.group)
            if not links.feeds(s):
                continue
            if links.through[s]:
                yield None  # the state that leaves depends on the one that enters
                for work in receives.pop(s, []):
                    work.wait()
                out = leave(row_of(maps.transition, row), maps.offset[row], entering[row])
            else:
                out = maps.offset[row].contiguous()
            if owner[s + 1] == rank:
                entering[links.row[s + 1]] = out
            else:  # the transport reads `out` until its work is done
                message = out, owner[s + 1]
                sends.append((message, collectives.send_and_receive([message], [], self.group)))
        yield None
        for work in chain(*receives.values(), *(works for _, works in sends)):
            work.wait()
        yield entering
