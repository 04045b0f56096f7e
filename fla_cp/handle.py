"""What a compiled graph knows about a context: its number, and the sizes that shapes depend on."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fla_cp.comm import Halo, Links
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK


class Sizes(NamedTuple):
    """The sizes of a packing that shapes depend on.

    chunks, sequences, ranges: how many there are. carried, feeding, middle: how many segments a
    state enters, leaves, and passes through. slots: the ranges of the rank that has most. through:
    1 if any transition is sent, otherwise 0. sent: tokens that other ranks' convolutions read.
    padded: the same of the rank that sends most.
    """

    chunks: int
    carried: int = 0
    feeding: int = 0
    middle: int = 0
    sequences: int = 1
    ranges: int = 1
    slots: int = 1
    through: int = 0
    sent: int = 0
    padded: int = 0


class Handle(NamedTuple):
    """A context for a compiled graph, as two tensors on the host: torch.compile would compile again
    for every new int.

    number [1]: of the context, -1 for none. sizes: an empty tensor whose shape holds the fields of
    `Sizes`, each increased by two, because torch.compile also compiles again for 0 and 1.
    """

    number: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, number: int, p: Packing, links: Links, halo: Halo | None) -> Self:
        return cls.make(
            number,
            Sizes(
                chunks=sum((s.stop - s.start + CHUNK - 1) // CHUNK for s in p.segments),
                carried=len(p.carried),
                feeding=len(p.feeding),
                middle=len(p.middle),
                sequences=p.sequences,
                ranges=p.ranges,
                slots=links.slots_per_rank,
                through=int(links.any_through),
                sent=len(halo.gathered.rows) if halo else 0,
                padded=halo.gathered.padded if halo else 0,
            ),
        )

    @classmethod
    def make(cls, number: int, sizes: Sizes) -> Self:
        shape = [n + 2 for n in sizes]
        return cls(
            torch.full((1,), number, dtype=torch.int64, device="cpu"),
            torch.empty(*shape, 0, dtype=torch.float32, device="cpu"),
        )

    @staticmethod
    def read(sizes: Tensor) -> Sizes:
        return Sizes(*(n - 2 for n in sizes.shape[:-1]))
