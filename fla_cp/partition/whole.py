"""Packings of whole sequences that share frames, made with little work of the host.

In training almost every batch has a new packing, so the host's work for one is paid in every step.
A call that replays a program needs the frame and the device tables of its packing, but not the list
of segments. That list is therefore made only if something asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Build, DeviceTable
from fla_cp.partition.packing import Frame, Packing, Segment
from fla_cp.rule import CHUNK

Source = tuple[Tensor, int | None]
"""Offsets on a device, and the address of the current stream; None if launches are watched."""

Former = Callable[[Build, "WholeSequences", Tensor, int | None], DeviceTable | None]
"""Forms the table of a packing that `build` would list, from a `Source`. None if it cannot."""


class WholeSequences(Packing):
    """The packing of all tokens on one rank alone, filled up to the sizes of a frame.

    It has the segments and the tables of `Packing.build(given, frame=frame)`.
    given: the offsets [N+1], which the caller has checked. frame: that of `Frame.around`.
    former: forms tables on the device, if that is possible. It does so when a program asks for them
    right before its first launch: a launch displaces what runs around it from the processor's
    caches. source: where the former reads the offsets; None once it has done so.
    """

    given: tuple[int, ...]
    frame: Frame
    former: Former | None
    source: Source | None
    ranges = 1
    loads = ()

    def __init__(
        self,
        given: tuple[int, ...],
        frame: Frame,
        former: Former | None = None,
        source: Source | None = None,
    ) -> None:
        keep = object.__setattr__  # a frozen dataclass does not allow to set its attributes
        keep(self, "given", given)
        keep(self, "frame", frame)
        keep(self, "former", former)
        keep(self, "source", source)
        # As in `Tabled`, whose cached properties take a lock in Python 3.11.
        keep(self, "_on_devices", {})

    @classmethod
    def of(cls, given: tuple[int, ...], chunk: int = CHUNK) -> Self:
        """The packing of these offsets, filled up to rounded sizes."""
        counts = [-(-(b - a) // chunk) for a, b in pairwise(given)]
        return cls(given, Frame.around(len(counts) - counts.count(0), sum(counts), chunk))

    def read_from(self, cu_seqlens: Tensor, stream: int | None) -> None:
        """Takes another `source` if one is still needed, because an earlier call failed before it
        asked for tables. The values of its tensor may have changed."""
        if self.source is not None:
            object.__setattr__(self, "source", (cu_seqlens, stream))

    def _new_table(self, build: Build, dtype: torch.dtype, device: torch.device) -> DeviceTable:
        former, source, table = self.former, self.source, None
        object.__setattr__(self, "source", None)
        if former is not None and source is not None:
            table = former(build, self, *source)
        return table or super()._new_table(build, dtype, device)

    @property
    def tokens(self) -> int:
        return self.given[-1]

    @property
    def sequences(self) -> int:
        return len(self.given) - 1

    @property
    def chunk(self) -> int:
        return self.frame.chunk

    @cached_property
    def _listed(self) -> Packing:
        return Packing.build(self.given, frame=self.frame, chunk=self.chunk)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._listed.segments

    @property
    def empty(self) -> tuple[int, ...]:
        return self._listed.empty

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        edges = [*dict.fromkeys(self.given)]  # sequences without tokens are no segments
        edges += [self.tokens] * (self.count + 1 - len(edges))
        chunks = [-(-(b - a) // self.chunk) for a, b in pairwise(edges)]
        return edges[:-1], edges[1:], chunks
