"""What the exchanges of keys and values share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from fla_cp.partition.key_rows import Lengths
from fla_cp.partition.key_tables import KeyTables

WHAT = "keys and values"
"""What travels, as a rank that waits too long says it."""


class Sizes(NamedTuple):
    """H query heads and HK key heads, K and V channels; itemsize: bytes of a number."""

    H: int
    HK: int
    K: int
    V: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """Of the keys and values of one token."""
        return self.HK * (self.K + self.V) * self.itemsize

    @property
    def held_bytes(self) -> int:
        """What a rank holds of a token whose keys and values it reads."""
        return self.key_bytes


class LatentSizes(NamedTuple):
    """Latent attention: H heads of K and V channels, which are expanded from `wire` numbers."""

    H: int
    K: int
    V: int
    wire: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """Of what travels of one token."""
        return self.wire * self.itemsize

    @property
    def held_bytes(self) -> int:
        """Of that, and of the keys and values that it is expanded to."""
        return self.key_bytes + self.H * (self.K + self.V) * self.itemsize


class Traffic(NamedTuple):
    """Bytes that a rank sends to others and receives from them, in a forward and a backward."""

    sent: int
    received: int


class Found(Protocol):
    """o [Tq, H, V] and lse [H, Tq]; see `fla_cp.kernels.torch.attention.Attended`."""

    @property
    def o(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


class Kernels(Protocol):
    """`fla_cp.kernels.torch.attention`, on q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V] of sequences
    side by side."""

    def attention_over(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None
    ) -> Tensor:
        """o, differentiable."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Found:
        """The same without a graph, and lse."""

    def attend_bwd(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        lengths: Lengths,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v. o and lse: over all keys, of which k and v may be some."""


@dataclass(frozen=True)
class KeysValues:
    """A scheme that brings queries, keys and values of several ranks together."""

    tables: KeyTables
    sizes: Sizes | LatentSizes

    def refusal(self) -> str | None:
        """The rule that these sizes break, and their values; None if the scheme can run."""
        return None

    def traffic(self) -> list[Traffic]:
        """Of each rank. All ranks compute the same figures."""
        raise NotImplementedError

    def memory(self) -> int:
        """Bytes of keys and values that the busiest rank holds at once besides its own."""
        raise NotImplementedError

    def attention(
        self,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup | None,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        """k [T, HK, K], v [T, HK, V] of this rank's tokens -> o [T, H, V]. Differentiable.

        queries: gives q [T, H, K]; called once, when q is needed. Work handed over with `Overlap`
        runs during the first exchange."""
        raise NotImplementedError

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sends or receives, whichever are more."""
        return max(max(rank) for rank in self.traffic())
