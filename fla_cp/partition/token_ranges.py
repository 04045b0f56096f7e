"""Which rank owns which tokens: the two divisions that the package provides."""

from itertools import pairwise

from fla_cp.partition.checks import check_division


def contiguous_token_ranges(total: int, world_size: int) -> list[list[tuple[int, int]]]:
    """One range for each rank, in order. Their lengths differ by at most one token.

    total: the number of tokens. world_size: the number of ranks. Raises ValueError unless they are
    integers from 0 and from 1.
    """
    total, world_size = check_division(total, world_size)
    edges = [total * r // world_size for r in range(world_size + 1)]
    return [[edge] for edge in pairwise(edges)]


def zigzag_token_ranges(total: int, world_size: int) -> list[list[tuple[int, int]]]:
    """Two ranges for each of R ranks: rank r has pieces r and 2R-1-r of 2R equal pieces.

    This balances causal softmax attention, whose work grows along the sequence. Layers of softmax
    attention and of linear attention can then share one sharding. Arguments and errors are those of
    `contiguous_token_ranges`.
    """
    total, world_size = check_division(total, world_size)
    edges = [total * i // (2 * world_size) for i in range(2 * world_size + 1)]
    pieces = list(pairwise(edges))
    return [[pieces[r], pieces[2 * world_size - 1 - r]] for r in range(world_size)]


Ranges = tuple[tuple[int, int], ...]
