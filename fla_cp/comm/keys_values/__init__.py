"""Exchange of keys and values for softmax attention, where tokens have to travel.

Let X = T HK (K + V) itemsize be the bytes of the keys and values of T tokens, and
Q = T H (K + V) itemsize those of their queries and results. In a forward and a backward of one
document over R contiguous ranges of T tokens, the busiest rank sends or receives

    gathered   (R-1) X                                keys and values go to the queries
    by_heads   2 (R-1)/R (Q + max(1, R/HK) X)         whole documents for H/R heads
    ring       2 (R-1) X                              as gathered, and once more in the backward

Figures for any documents and ranges come from `KeysValues.traffic`, and docs/design.md has
examples. "auto" takes the scheme with the fewest bytes on its busiest rank, among those that can
run and whose keys and values fit: `MAX_GATHERED` bytes on a rank. A ring always fits.

Latent attention (`nn.MultiHeadLatentAttention`) sends latents, kv_lora_rank + qk_rope_head_dim
numbers a token, and each rank expands those that it got. By heads, keys and values would travel
expanded. With the sizes of Kimi Linear (32 heads of 192 and 128 channels, 576 numbers in a latent)
these are 10240 numbers a token, with as many for queries and results, shared by R ranks. The
latents are fewer bytes up to 71 ranks, with zig-zag ranges up to 47, but 32 heads can be divided
among 32 ranks at most. So latents are gathered, or go round in a ring where the keys and values
expanded from them, 20 KiB a token in bf16, would need more than `MAX_GATHERED`. In a ring a rank
expands the latents of one other rank at a time.
"""

from __future__ import annotations

from fla_cp.comm.keys_values.base import KeysValues, LatentSizes, Sizes
from fla_cp.comm.keys_values.by_heads import ByHeads
from fla_cp.comm.keys_values.gathered import Gathered
from fla_cp.comm.keys_values.ring import Ring
from fla_cp.partition.key_tables import KeyTables

__all__ = [
    "EXCHANGES",
    "SCHEMES",
    "Gathered",
    "KeysValues",
    "LatentSizes",
    "Sizes",
    "make_exchange",
]

SCHEMES: dict[str, type[KeysValues]] = {"gathered": Gathered, "by_heads": ByHeads, "ring": Ring}
"""In the order of preference for equal bytes."""

EXCHANGES = ("auto", *SCHEMES)

MAX_GATHERED = 8 << 30
"""Bytes of keys and values of other ranks that "auto" lets a rank hold in one call; of latents,
those that are expanded from them count, too. Their gradients take as much again in the backward."""

RINGS = ("gathered", "ring")
"""Schemes of latent attention and of compiled graphs."""


def make_exchange(
    exchange: str,
    tables: KeyTables,
    sizes: Sizes | LatentSizes,
    *,
    allowed: tuple[str, ...] = tuple(SCHEMES),
) -> tuple[str, KeysValues]:
    """The name and the scheme for `exchange`, one of `EXCHANGES`; equal on all ranks. allowed: what
    "auto" may take. If no rank needs another's keys, it is "gathered", which then sends nothing.

    Raises ValueError if the scheme that was asked for cannot run with these sizes.
    """
    schemes = {name: kind(tables, sizes) for name, kind in SCHEMES.items()}
    if not tables.rows.crosses:
        return "gathered", schemes["gathered"]
    if exchange == "auto":
        exchange = tables.cached(
            (make_exchange, type(sizes), sizes, allowed), lambda: _chosen(schemes, allowed)
        )
    elif (refusal := schemes[exchange].refusal()) is not None:
        raise ValueError(f"exchange={exchange!r} {refusal}")
    return exchange, schemes[exchange]


def _chosen(schemes: dict[str, KeysValues], allowed: tuple[str, ...]) -> str:
    fitting = [
        name
        for name in allowed
        if schemes[name].refusal() is None
        and (name == "ring" or schemes[name].memory() <= MAX_GATHERED)
    ]
    return min(fitting, key=lambda name: schemes[name].busiest)
