"""Neighbouring ranks whose memory is on one device, for the exchange as one kernel."""

import torch
from torch import Tensor

from fla_cp.comm import Links, SlotMaps
from fla_cp.comm.affine import leave
from fla_cp.comm.exchange.symmetric import crossing
from fla_cp.comm.peer_memory import Mailbox, Room, mailbox
from fla_cp.kernels.triton.exchange import fold
from fla_cp.partition.slots import link_slots


class Neighbours:
    """The mailboxes of R ranks, as `Mailboxes` makes them of symmetric memory. folder: the memory
    is in files there, which processes share."""

    def __init__(
        self, R: int, HV: int, K: int, V: int, device: torch.device | str, folder: str = ""
    ):
        room = Room(*fold.room(HV, K, V))
        self.memory = [
            torch.from_file(f"{folder}/{r}", shared=True, size=room.elements)
            if folder
            else torch.zeros(room.elements, device=device)
            for r in range(R)
        ]
        self.numbers = torch.zeros(2, R, room.tiles, dtype=torch.int32, device=device)
        self.boxes: dict[bool, list[Mailbox]] = {
            way: [
                mailbox(self.memory, self.numbers[int(way), r], r, room, reverse=way)
                for r in range(R)
            ]
            for way in (False, True)
        }

    def run(self, rank: int, links: Links, maps: SlotMaps, out: Tensor) -> Tensor:
        """Launches one rank's part of an exchange; returns out [1, HV, K, V]."""
        (table,) = links.table(crossing(rank), torch.int32, out.device)
        mail = self.boxes[links.owner[0] != 0][rank]
        fold.pass_on(maps.transition, maps.offset, table, mail, out)
        return out


def in_line(R: int, *cuts: int) -> Links:
    """R ranks with 10 tokens each, and documents that begin at 0 and at the cuts."""
    return link_slots((0, *cuts, 10 * R), tuple(((10 * r, 10 * r + 10),) for r in range(R)))


def drawn(R: int, HV: int, K: int, V: int, device: torch.device | str) -> list[SlotMaps]:
    """The maps of R ranks: transitions that keep the size of a state, and offsets."""
    gen = torch.Generator().manual_seed(R)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(device)  # noqa: E731
    return [SlotMaps(draw(1, HV, K, K) / K**0.5, draw(1, HV, K, V)) for _ in range(R)]


def entering(links: Links, maps: list[SlotMaps], dtype: torch.dtype) -> list[Tensor]:
    """The states [1, HV, K, V] that enter the ranks, by the definition, in dtype."""
    zero = torch.zeros_like(maps[0].offset, dtype=dtype)
    found, state = [zero] * len(maps), zero
    for s, rank in enumerate(links.owner):
        if links.continues[s]:
            found[rank] = state
        M, B = maps[rank].transition, maps[rank].offset.to(dtype)
        through = links.through[s] and M is not None
        state = leave(M.to(dtype) if through else None, B, state)
    return found
