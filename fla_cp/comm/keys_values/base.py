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
"""The name of what travels, which traces and warnings of long waits show."""


class Sizes(NamedTuple):
    """The sizes of a call: H query heads and HK key heads, K channels of queries and keys, V of
    values. itemsize: the bytes of one number."""

    H: int
    HK: int
    K: int
    V: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """The bytes of one token's keys and values, which travel."""
        return self.HK * (self.K + self.V) * self.itemsize

    @property
    def held_bytes(self) -> int:
        """The bytes that a rank holds of each token whose keys and values it reads."""
        return self.key_bytes


class LatentSizes(NamedTuple):
    """The sizes of latent attention: H heads of K and V channels, which are expanded from `wire`
    numbers a token."""

    H: int
    K: int
    V: int
    wire: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """The bytes of one token that travel."""
        return self.wire * self.itemsize

    @property
    def held_bytes(self) -> int:
        """The bytes that a rank holds of each token that it reads: those that travelled, and the
        keys and values expanded from them."""
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
    """What schemes use of `fla_cp.kernels.torch.attention`: functions of q [Tq, H, K],
    k [Tk, HK, K] and v [Tk, HK, V], in which sequences lie side by side."""

    def attention_over(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None
    ) -> Tensor:
        """o, differentiable."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Found:
        """o and lse, not differentiable."""

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
        """The gradients of q, k and v. o and lse are those over all keys; k and v may have only
        some of the keys."""


@dataclass(frozen=True)
class KeysValues:
    """A scheme of exchange: it brings queries, keys and values of several ranks together."""

    tables: KeyTables
    sizes: Sizes | LatentSizes

    def refusal(self) -> str | None:
        """Why the scheme cannot run with these sizes, as the end of an error message; None if it
        can."""
        return None

    def traffic(self) -> list[Traffic]:
        """The traffic of each rank. All ranks compute the same figures."""
        raise NotImplementedError

    def memory(self) -> int:
        """The most bytes of keys and values that any rank holds at once, besides its own."""
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
        """o [T, H, V] of this rank's tokens, from their k [T, HK, K] and v [T, HK, V].
        Differentiable.

        queries: returns q [T, H, K]. It is called once, when q is needed. Work that was handed over
        with `Overlap` runs during the first exchange."""
        raise NotImplementedError

    @property
    def busiest(self) -> int:
        """The bytes that the busiest rank sends or receives, whichever is more."""
        return max(max(rank) for rank in self.traffic())
