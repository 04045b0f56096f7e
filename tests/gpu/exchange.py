"""The check of the exchange between neighbours, as in checks.py."""

from functools import partial

import torch

from fla_cp.comm import SlotMaps
from tests.gpu import checks
from tests.gpu.cases import FP32
from tests.support.one_memory import Neighbours, drawn, entering, in_line

EXCHANGES = ((3, 24, 40), (2, 96, 64), (40, 128, 128), (4, 192, 128), (4, 256, 256))
"""HV, K, V of the exchange between neighbours."""


def check_exchange() -> checks.Rows:
    """Exchanges of four ranks on one GPU, one after the other, so that none waits. With 160 tiles
    a program takes several. tests/multi_gpu/one_gpu_exchange.py runs ranks at the same time."""
    return [
        {"K": K, "V": V, "case": f"exchange{' reverse' * reverse} HV={HV}"}
        | checks.judged(partial(exchanged, reverse=reverse), states_of(HV, K, V), FP32)
        for HV, K, V in EXCHANGES
        for reverse in (False, True)
    ]


def states_of(HV: int, K: int, V: int) -> checks.Named:
    maps = drawn(4, HV, K, V, checks.DEVICE)
    return {"M": torch.cat([m.transition for m in maps]), "B": torch.cat([m.offset for m in maps])}


def exchanged(x: checks.Named, impl: str, *, reverse: bool) -> checks.Named:
    links = in_line(4).mirrored() if reverse else in_line(4)
    transition = x["M"].mT if reverse else x["M"]
    maps = [SlotMaps(transition[r : r + 1], x["B"][r : r + 1]) for r in range(4)]
    if impl == "torch":
        return {"states": torch.cat(entering(links, maps, x["B"].dtype))}
    ranks, out = Neighbours(4, *x["B"].shape[1:], checks.DEVICE), torch.empty_like(x["B"])
    for rank in links.owner:
        ranks.run(rank, links, maps[rank], out[rank : rank + 1])
    return {"states": out}
