"""AllGather: every rank receives the maps of all slots."""

import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.affine import Fold, fold
from fla_cp.comm.exchange.base import GroupExchange, Pending, Sent, SlotMaps, fold_wires, pack
from fla_cp.comm.timing import named
from fla_cp.partition.slots import Links
from fla_cp.tape import step


class AllGather(GroupExchange):
    """Every rank receives all maps in one collective and folds those before its own slots."""

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        wires, sent = step(_gather, pack(maps, links), self.group)

        def finish(_: object) -> Tensor:
            return fold_wires(wires, links, dist.get_rank(self.group), maps.offset, fold)

        return Pending(sent, finish)


def _gather(wire: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Sent]:
    with named("start of exchange of states"):
        wires, work = collectives.all_gather(wire, group)

    def wait() -> None:
        work.wait()

    return wires, Sent(wait, wire.device)
