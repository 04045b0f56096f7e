"""Strictly lower triangular matrices [n, 64, 64] as chunks have them, and their inverses."""

from collections.abc import Callable

import torch
from torch import Tensor


def drawn(n: int, gen: torch.Generator) -> Tensor:
    return 0.1 * torch.randn(n, 64, 64, generator=gen).tril(-1)


def of_parallel_keys(n: int, gen: torch.Generator) -> Tensor:
    """Products of keys that are nearly the same, of which each token removes all."""
    k = torch.randn(n, 1, 128, generator=gen) + 0.1 * torch.randn(n, 64, 128, generator=gen)
    k = torch.nn.functional.normalize(k, dim=-1)
    return (k @ k.mT).tril(-1)


def inverses_by_warps(
    x: Tensor, terms: int, dtype: torch.dtype, product: Callable[..., Tensor]
) -> Tensor:
    """The terms [n, terms, 64, 64] of (I - N)^-1, where N is x below the diagonal, by the code of
    the Gluon kernels. product: what multiplies in the place of `mma.sync`."""
    from fla_cp.kernels.sm90 import inverse
    from tests.support.gluon_interpreter import Pointers, Shared, interpreted

    to = torch.zeros(len(x), terms, 64, 64, dtype=dtype)
    with interpreted():
        inverse.mma_v2 = product
        for n in range(len(x)):
            places = [Shared(torch.full((64, 64), float("nan"), dtype=dtype)) for _ in range(4)]
            inverse.store_inverse(x[n], Pointers(to, n * terms * 64 * 64), places, 0, terms)
    return to
