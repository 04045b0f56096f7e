"""ByHeads: each rank folds the maps of some heads for all ranks."""

from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, leave
from fla_cp.comm.exchange.base import GroupExchange, Rounds, SlotMaps, pack, unpack
from fla_cp.partition.slots import Links


class ByHeads(GroupExchange):
    """Two all-to-alls: one gives each rank the maps of all ranks for its share of the heads, and
    after the fold another sends every rank the states that enter its slots."""

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        wire = pack(maps, links).transpose(0, 1)  # heads first
        _, HV, K, V = maps.offset.shape
        R, rank, J = dist.get_world_size(self.group), dist.get_rank(self.group), wire.shape[1]
        shares = [hi - lo for lo, hi in pairwise(HV * r // R for r in range(R + 1))]
        mine = [shares[rank]] * R
        got, work = collectives.all_to_all(wire.flatten(1), shares, mine, self.group)
        yield None
        work.wait()
        wires = got.view(R, shares[rank], J, K, wire.shape[-1]).transpose(1, 2)
        states = wires.new_zeros(R, J, shares[rank], K, V)
        state: Tensor | None = None
        for s, (owner, row) in enumerate(zip(links.owner, links.row, strict=True)):
            if state is not None and links.continues[s]:
                states[owner, row] = state
            if links.feeds(s):
                one = unpack(wires[owner, row], V)
                state = leave(one.transition if links.through[s] else None, one.offset, state)
        back = states.transpose(1, 2).reshape(R * shares[rank], J * K * V)
        heads, work = collectives.all_to_all(back, mine, shares, self.group)
        work.wait()
        entering = heads.view(HV, J, K, V).transpose(0, 1)
        yield entering[: len(maps.offset)].contiguous()
