"""AllGather: every rank receives the maps of all slots."""

import torch.distributed as dist

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold
from fla_cp.comm.exchange.base import GroupExchange, Rounds, SlotMaps, fold_wires, pack
from fla_cp.partition.slots import Links


class AllGather(GroupExchange):
    """Every rank receives every map in one collective and folds those before its own slots."""

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        gathered, work = collectives.all_gather(pack(maps, links), self.group)
        yield None
        work.wait()
        yield fold_wires(gathered, links, dist.get_rank(self.group), maps.offset, fold)
