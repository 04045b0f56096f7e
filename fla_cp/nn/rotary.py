"""Rotary positions (RoPE, arXiv 2104.09864), also stretched to longer sequences by YaRN.

Channels i and i + dim / 2 of a head form a pair, which is rotated at position p by the angle
p * base**(-2i / dim). The product of a query and a key then depends on their positions only through
the distance between them. DeepSeek's checkpoints pair neighbouring channels instead. That is the
same layer with the rows of its projections in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fla_cp.arguments import check_count, check_number, described
from fla_cp.partition.key_rows import Lengths
from fla_cp.rule import accumulator

Tables = tuple[Tensor, Tensor]
"""cos and sin [T, dim / 2] of each token's angles."""


@dataclass(frozen=True)
class YaRN:
    """Rotary positions for sequences longer than those on which a model was trained. Source: arXiv
    2309.00071, sec. 3.

    factor: how many times longer sequences become. original_length: how many tokens they had
    before. Pairs of channels that turn more than beta_fast times within original_length stay as
    they are. Those that turn less than beta_slow times turn `factor` times slower, and those
    between are interpolated.
    Raises ValueError for numbers out of range.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        check_number("factor", self.factor, 1, or_equal=True)
        check_count("original_length", self.original_length)
        check_number("beta_slow", self.beta_slow, 0)
        check_number("beta_fast", self.beta_fast, self.beta_slow, or_equal=True)

    @property
    def magnitude(self) -> float:
        """The factor on queries and on keys that keeps attention as sharp as over fewer tokens."""
        return 0.1 * math.log(self.factor) + 1

    def applied(self, frequencies: Tensor, base: float) -> Tensor:
        """The changed frequencies of the pairs, [dim / 2], in radians a token."""
        pairs = len(frequencies)

        def pair(turns: float) -> float:
            """The index of the pair that turns that often within original_length."""
            return pairs * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), 2 * pairs - 1)
        width = max(high - low, 1e-3)
        index = torch.arange(pairs, dtype=torch.float64, device=frequencies.device)
        slowed = ((index - low) / width).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)


@dataclass(frozen=True)
class Rotary:
    """The rotation of the first `dim` channels of a head.

    dim: even, from 2. base: the longest period is about 2 pi base tokens. scaling: for sequences
    longer than those on which the model was trained.
    Raises ValueError for other values.
    """

    dim: int
    base: float = 10000.0
    scaling: YaRN | None = None

    def __post_init__(self) -> None:
        if check_count("rotary_dim", self.dim) % 2:
            raise ValueError(f"rotary_dim must be even, got {self.dim}")
        check_number("rope_theta", self.base, 1)
        if self.scaling is not None and not isinstance(self.scaling, YaRN):
            raise ValueError(f"rope_scaling must be a YaRN or None, got {described(self.scaling)}")

    @property
    def magnitude(self) -> float:
        """The factor on queries and on keys that YaRN needs."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """The frequencies of the pairs, [dim / 2] fp64, in radians a token."""
        even = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        plain = self.base ** (-even / self.dim)
        return plain if self.scaling is None else self.scaling.applied(plain, self.base)

    def tables(self, lengths: Lengths, like: Tensor, magnitude: float = 1.0) -> Tables:
        """The tables of all queries, on the device of `like`, fp32 (fp64 if `like` is). Positions
        count from the beginning of each sequence. Angles are formed in fp64, because in fp32 they
        are wrong by up to 0.06 at a million tokens. magnitude: a factor on cos and sin. The tables
        are made once for all layers."""
        dtype, device = accumulator(like.dtype), like.device

        def build() -> Tables:
            with torch.inference_mode(False):  # a later backward reads them
                return self.turned(lengths.positions(device), dtype, magnitude)

        if lengths.changes:  # a CUDA graph forms them at each replay
            return self.turned(lengths.positions(device), dtype, magnitude)
        return lengths.cached((self, magnitude, dtype, device), build)

    def turned(self, positions: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> Tables:
        """The tables, in `dtype`, of tokens at these positions [T] int64 of their sequences."""
        turns = self.frequencies(positions.device)
        angles = positions.to(torch.float64)[:, None] * turns
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotary_of(
    dim: int, theta: float | None, scaling: YaRN | None, rotary_dim: int | None = None
) -> Rotary | None:
    """The rotation of a layer's heads; None for a layer without positions (theta=None).

    dim: how many channels are rotated unless rotary_dim is given. Raises ValueError as `Rotary`
    does, and for a rotary_dim or scaling of a layer without positions.
    """
    if theta is not None:
        return Rotary(dim if rotary_dim is None else rotary_dim, theta, scaling)
    for name, value in (("rotary_dim", rotary_dim), ("rope_scaling", scaling)):
        if value is not None:
            raise ValueError(
                f"{name} must be None in a layer without positions (rope_theta=None), got "
                f"{described(value)}"
            )
    return None


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """x [B, T, H, D] with its first channels rotated, in x's dtype. tables: of B * T tokens."""
    cos, sin = (t.unflatten(0, x.shape[:2])[:, :, None] for t in tables)
    n = cos.shape[-1]
    a, b, rest = x.split([n, n, x.shape[-1] - 2 * n], -1)
    wide_a, wide_b = a.to(cos.dtype), b.to(cos.dtype)
    turned = wide_a * cos - wide_b * sin, wide_b * cos + wide_a * sin
    return torch.cat([*(t.to(x.dtype) for t in turned), rest], -1)
