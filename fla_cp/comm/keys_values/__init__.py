"""Exchange of keys and values for softmax attention, where tokens have to travel.

Let X = T HK (K + V) itemsize be the bytes of the keys and values of T tokens, and
Q = T H (K + V) itemsize those of their queries and results. In a forward and a backward of one
document over R contiguous ranges of T tokens, the busiest rank sends or receives

    gathered   (R-1) X                                keys and values go to the queries
    by_heads   2 (R-1)/R (Q + max(1, R/HK) X)         whole documents for H/R heads
    ring       2 (R-1) X                              as gathered, and once more in the backward

`KeysValues.traffic` computes the figures for any documents and ranges, and docs/design.md has
examples. "auto" takes the scheme with the fewest bytes on its busiest rank, among those that can
run and that need at most `MAX_GATHERED` bytes of keys and values on a rank. A ring always fits.

Latent attention (`nn.MultiHeadLatentAttention`) is never exchanged by heads. It sends latents,
kv_lora_rank + qk_rope_head_dim numbers a token, and each rank expands the latents that it got. By
heads, the expanded keys and values would travel. With the sizes of Kimi Linear (32 heads of 192 and
128 channels, 576 numbers in a latent) these are 10240 numbers a token, with as many for queries and
results, shared by R ranks. The latents are fewer bytes up to 71 ranks, or 47 with zig-zag ranges,
and 32 heads cannot be divided among more than 32 ranks. Latents are therefore gathered, or go round
in a ring if the keys and values expanded from them, 20 KiB a token in bf16, would need more than
`MAX_GATHERED`. In a ring a rank expands the latents of one other rank at a time.
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
"""The schemes by name. Of schemes with equal bytes, "auto" takes the first."""

EXCHANGES = ("auto", *SCHEMES)

MAX_GATHERED = 8 << 30
"""The most bytes of other ranks' keys and values that "auto" lets a rank hold in one call. For
latents, the keys and values that are expanded from them count, too. In the backward, the gradients
take as much again."""

RINGS = ("gathered", "ring")
"""The schemes that latent attention and compiled graphs may use."""


def make_exchange(
    exchange: str,
    tables: KeyTables,
    sizes: Sizes | LatentSizes,
    *,
    allowed: tuple[str, ...] = tuple(SCHEMES),
) -> tuple[str, KeysValues]:
    """The name of the scheme for `exchange`, one of `EXCHANGES`, and the scheme itself. They are
    equal on all ranks. allowed: the schemes that "auto" may take. If no rank needs another's keys,
    the scheme is "gathered", which then sends nothing.

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
