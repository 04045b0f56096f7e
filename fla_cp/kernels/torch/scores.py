"""Decayed scores inside a chunk, with no exponent above zero.

    A[i, j] = sum_d x_i[d] y_j[d] exp(G_i[d] - G_j[d])      for j < i (j <= i with `diagonal`)

With one gate a head (G [.., C, 1]) the decay is a factor of the plain score. With one a channel,
exp(G_i) * exp(-G_j) would overflow. Instead the chunk is halved again and again: for a pair of
neighbouring blocks, rows i in the second and columns j in the first, the last row of the first
block is the reference r, and both factors of

    exp(G_i - G_r) * exp(G_r - G_j)

are at most one, because G never grows. Six levels cover a chunk of 64, each with one matrix
product per pair and one exponential per token and channel: any gate is safe, and no [C, C, K]
tensor is formed. The rows may have sums of their own, between G of the row before and G.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Exp = Callable[[Tensor], Tensor]


def _levels(C: int) -> list[int]:
    """C/2, C/4, .., 1."""
    return [C >> i for i in range(1, C.bit_length())]


def _pairs(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """First and second blocks [.., C/2s, s, D] of each pair of blocks of s rows."""
    first, second = x.unflatten(-2, (-1, 2, s)).unbind(-3)
    return first, second


def _block(A: Tensor, s: int) -> Tensor:
    """View [.., s, s, C/2s] of A: rows in each pair's second block, columns in its first."""
    tiled = A.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))
    return tiled[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)


def _factors(gx: Tensor, gc: Tensor, s: int, exp: Exp) -> tuple[Tensor, Tensor]:
    """Decay from the reference row to each row, and from each column to the reference row."""
    first, second = _pairs(gc, s)[0], _pairs(gx, s)[1]
    ref = first[..., -1:, :]
    return exp(second - ref), exp(ref - first)


def _decays(gx: Tensor, gc: Tensor, exp: Exp, diagonal: bool) -> Tensor:
    """exp(G_i - G_j) [.., C, C] for one gate a head, zero above the diagonal."""
    C = gc.shape[-2]
    lower = torch.ones(C, C, dtype=torch.bool, device=gc.device).tril(0 if diagonal else -1)
    return exp((gx - gc.transpose(-1, -2)).masked_fill(~lower, -torch.inf))


def gram(x: Tensor, y: Tensor, gx: Tensor, gc: Tensor, exp: Exp, *, diagonal: bool) -> Tensor:
    """A [.., C, C], lower triangular. x, y [.., C, K]; gx, gc [.., C, K] or [.., C, 1]: the sums G
    of the rows and of the columns."""
    if gc.shape[-1] == 1:
        return (x @ y.transpose(-1, -2)) * _decays(gx, gc, exp, diagonal)
    C = x.shape[-2]
    A = x.new_zeros(*x.shape[:-1], C)
    if diagonal:
        A.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
    for s in _levels(C):
        row, col = _factors(gx, gc, s, exp)
        scores = (_pairs(x, s)[1] * row) @ (_pairs(y, s)[0] * col).transpose(-1, -2)
        _block(A, s).copy_(scores.movedim(-3, -1))
    return A


def gram_bwd(
    dA: Tensor, x: Tensor, y: Tensor, gx: Tensor, gc: Tensor, exp: Exp, *, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """dx and dy [.., C, K]; only the lower triangle of dA [.., C, C] is read."""
    if gc.shape[-1] == 1:
        dA = dA * _decays(gx, gc, exp, diagonal)
        return dA @ y, dA.transpose(-1, -2) @ x
    if diagonal:
        d = dA.diagonal(dim1=-2, dim2=-1)[..., None]
        dx, dy = d * y, d * x
    else:
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
    for s in _levels(x.shape[-2]):
        row, col = _factors(gx, gc, s, exp)
        scores = _block(dA, s).movedim(-1, -3)
        _pairs(dx, s)[1].add_(row * (scores @ (_pairs(y, s)[0] * col)))
        _pairs(dy, s)[0].add_(col * (scores.transpose(-1, -2) @ (_pairs(x, s)[1] * row)))
    return dx, dy
