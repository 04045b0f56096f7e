"""Latent attention: latents travel, and each rank expands them to keys and values."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp import remat
from fla_cp.comm.keys_values.base import LatentSizes
from fla_cp.comm.keys_values.ring import RingCall, ring, ring_bwd
from fla_cp.comm.overlap import run_overlap
from fla_cp.once_differentiable import once_differentiable
from fla_cp.rule import accumulator


class Expanded(NamedTuple):
    """k [N, H, K] and v [N, H, V] of N tokens. In each head, k has first the channels that are
    expanded from the latent, and then those that all heads share."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, each: Tensor, shared: Tensor, v_channels: int) -> Expanded:
        """each [N, H, n]: the expanded channels of each head's k and v, side by side. shared
        [N, p]: the channels that all heads share."""
        k, v = each.split([each.shape[2] - v_channels, v_channels], -1)
        return cls(torch.cat([k, shared[:, None].expand(-1, each.shape[1], -1)], -1), v)


class LatentWire:
    """What travels of a rank's tokens: latents and shared channels side by side, rows [T, R + p].

    weight [H * n, R] expands a latent to the first channels of each head's k, and to its v.
    """

    def __init__(self, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor):
        """q [T, H, K]: gives the number of heads and of channels. latent [T, R], shared [T, p]."""
        self._parts, self.weight, self.heads = (latent, shared), weight, q.shape[1]
        self.widths = latent.shape[1], shared.shape[1]
        self.k_channels = q.shape[2] - self.widths[1]
        self.v_channels = weight.shape[0] // self.heads - self.k_channels
        self._dweight: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        return torch.cat(self._parts, 1)

    @property
    def sizes(self) -> LatentSizes:
        R, p = self.widths
        K, itemsize = self.k_channels + p, self._parts[0].element_size()
        return LatentSizes(self.heads, K, self.v_channels, R + p, itemsize)

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The latents and the shared channels of rows."""
        return rows.split(self.widths, 1)

    def own(self) -> tuple[Tensor, Tensor]:
        return self.split(self.rows)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = self.parts(rows)
        each = (latent @ self.weight.T).unflatten(1, (self.heads, -1))
        return Expanded.of(each, shared, self.v_channels)

    def joined(self, rows: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of rows, from those of their keys and values. It also adds the rows' share
        to the gradient of the weight, in fp32 (fp64)."""
        each = torch.cat([dk[..., : self.k_channels], dv], -1).flatten(1)
        if self._dweight is None:
            self._dweight = torch.zeros_like(self.weight, dtype=accumulator(self.weight.dtype))
        self._dweight += each.T @ self.parts(rows)[0]
        return torch.cat([each @ self.weight, dk[..., self.k_channels :].sum(1)], 1)

    def weight_gradient(self) -> Tensor:
        """The gradient of the weight, summed over all rows that were passed to `joined`."""
        assert self._dweight is not None
        return self._dweight.to(self.weight.dtype)


def latent_ring(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, call: RingCall
) -> Tensor:
    """o [T, H, V] of this rank's tokens, from their q [T, H, K], latent [T, R] and shared [T, p].
    Differentiable. A rank expands the latents of one other rank at a time, in both directions."""
    o: Tensor = _LatentRing.apply(q, latent, shared, weight, call)
    return o


class _LatentRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, call: RingCall
    ) -> Tensor:
        name = ("latent ring", tuple(q.shape), tuple(weight.shape), q.dtype, call.scale)
        kept = remat.kept(name)
        if kept is None:
            o, lse = ring(q, LatentWire(q, latent, shared, weight), call)
            remat.keep(name, (o, lse))
        else:
            # The work that was handed over runs where the exchange ran it, because the checkpoint
            # compares the order of saved tensors.
            run_overlap(lambda: None)
            o, lse = (x for x in kept if x is not None)
        ctx.save_for_backward(q, latent, shared, weight, o, lse)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, shared, weight, o, lse = ctx.saved_tensors
        wire = LatentWire(q, latent, shared, weight)
        dq, total = ring_bwd(do, q, wire, o, lse, ctx.call)
        return dq, *wire.parts(total), wire.weight_gradient(), None
