"""What a compiled graph knows about a context: its number, and the sizes that shapes depend on."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fla_cp.comm import Halo, Links
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK_SIZES


class Sizes(NamedTuple):
    """The sizes of a packing that tensors' shapes depend on.

    chunks_of_16, chunks_of_32, chunks_of_64: how many chunks there are if each has so many tokens.
    sequences, ranges: how many there are. carried, feeding, middle: how many segments a
    state enters, leaves, and passes through. slots: the largest number of ranges that a rank owns.
    through: 1 if any transition is sent, otherwise 0. sent, padded: the number of rows and the
    field `padded` of `fla_cp.comm.halo.Gathered`; 0 without a convolution.
    """

    chunks_of_16: int = 0
    chunks_of_32: int = 0
    chunks_of_64: int = 0
    carried: int = 0
    feeding: int = 0
    middle: int = 0
    sequences: int = 1
    ranges: int = 1
    slots: int = 1
    through: int = 0
    sent: int = 0
    padded: int = 0

    def chunks(self, size: int) -> int:
        """How many chunks of so many tokens there are."""
        count: int = getattr(self, f"chunks_of_{size}")
        return count


def chunk_counts(lengths: Sequence[int], rows: int = 1) -> dict[str, int]:
    """How many chunks `rows` times runs of these lengths have, by field of `Sizes`."""
    return {
        f"chunks_of_{size}": rows * sum([(n + size - 1) // size for n in lengths])
        for size in CHUNK_SIZES
    }


VARYING = (*chunk_counts(()), "carried", "feeding", "middle", "sequences", "through")
"""The sizes that differ between packings. The others follow from how tokens are shared out."""


class Handle(NamedTuple):
    """A context for a compiled graph, as two tensors on the host. They stand for ints, because
    torch.compile would compile again for every new int.

    number [1]: the context's number, -1 for none. sizes: an empty tensor whose shape holds, after a
    dimension of 0, the fields of `Sizes`, each increased by two, because torch.compile also
    compiles again for 0 and 1. Its strides are 0: torch multiplies sizes from the first on, and
    strides of a contiguous tensor from the last, which overflowed int64 with millions of tokens
    (tests/partition/test_context.py).
    """

    number: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, number: int, p: Packing, links: Links, halo: Halo | None) -> Self:
        handle = cls.make(
            number,
            Sizes(
                **chunk_counts([s.stop - s.start for s in p.segments]),
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
        _mark_dynamic(handle.sizes)
        return handle

    @classmethod
    def make(cls, number: int, sizes: Sizes) -> Self:
        shape = (0, *(n + 2 for n in sizes))
        return cls(
            torch.full((1,), number, dtype=torch.int64, device="cpu"),
            torch.empty_strided(shape, [0] * len(shape), dtype=torch.float32, device="cpu"),
        )

    @staticmethod
    def read(sizes: Tensor) -> Sizes:
        return Sizes(*(n - 2 for n in sizes.shape[1:]))


def _mark_dynamic(sizes: Tensor) -> None:
    """Makes the first graph valid for any of the `VARYING` sizes. Otherwise torch.compile would
    take each size as a constant until it changes, and compile again for one after another.

    It does what torch._dynamo.maybe_mark_dynamic does in torch 2.10 to 2.13, whose import takes a
    second. tests/ops/test_compile.py counts the graphs.
    """
    varying = {1 + Sizes._fields.index(name) for name in VARYING}
    setattr(sizes, "_dynamo_weak_dynamic_indices", varying)  # noqa: B010
    setattr(sizes, "_has_dynamo_dim_marking", True)  # noqa: B010
