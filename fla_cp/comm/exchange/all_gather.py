"""AllGather: every rank receives the maps of all slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, fold
from fla_cp.comm.exchange.base import Pending, SlotMaps, Waiting, fold_wires, pack
from fla_cp.partition.slots import Links


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

        return Waiting(finish, wire.device)
