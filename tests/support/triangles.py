"""Strictly lower triangular matrices [n, 64, 64] as chunks have them."""

import torch
from torch import Tensor


def drawn(n: int, gen: torch.Generator) -> Tensor:
    return 0.1 * torch.randn(n, 64, 64, generator=gen).tril(-1)


def of_parallel_keys(n: int, gen: torch.Generator) -> Tensor:
    """Products of keys that are nearly the same, of which each token removes all."""
    k = torch.randn(n, 1, 128, generator=gen) + 0.1 * torch.randn(n, 64, 128, generator=gen)
    k = torch.nn.functional.normalize(k, dim=-1)
    return (k @ k.mT).tril(-1)
