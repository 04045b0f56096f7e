"""Checks of how a batch is divided and which rank owns which tokens: offsets, token ranges, groups.

They run before anything else. Each failure is a ValueError that names the argument, the rule and
the value.
"""

import operator
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from numbers import Integral
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_cu_seqlens(name: str, cu_seqlens: Tensor, tokens: int | None = None) -> None:
    """Checks offsets: 1-d int32 or int64, from 0, never decreasing, up to `tokens` if given.

    Values are read only from host tensors, so that the host does not wait for a device here.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.layout != torch.strided:
        raise ValueError(f"{name} must be dense, got {cu_seqlens.layout}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"{name} must be 1-d with N+1 >= 2 offsets, got {_shape(cu_seqlens)}")
    if cu_seqlens.device.type == "cpu":
        check_offsets(name, cu_seqlens.tolist(), tokens)


def check_host_copy(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, tokens: int | None = None) -> None:
    """Checks that cu_seqlens_cpu is a host copy of cu_seqlens. Their values are compared if both
    are on the host."""
    check_cu_seqlens("cu_seqlens_cpu", cu_seqlens_cpu, tokens)
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu must be on the CPU, got {cu_seqlens_cpu.device}")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu must have cu_seqlens' shape {_shape(cu_seqlens)}, "
            f"got {_shape(cu_seqlens_cpu)}"
        )
    if cu_seqlens.device.type == "cpu" and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
        raise ValueError(
            f"cu_seqlens_cpu must equal cu_seqlens {cu_seqlens.tolist()}, "
            f"got {cu_seqlens_cpu.tolist()}"
        )


def read_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, tokens: int) -> tuple[int, ...]:
    """The offsets of a call with T = tokens, after all checks of their values. The caller has
    checked dtype, dims and device of both tensors. Without cu_seqlens_cpu, the host waits for the
    device."""
    if cu_seqlens_cpu is None:
        offsets, name = cu_seqlens.tolist(), "cu_seqlens"
    else:
        offsets, name = cu_seqlens_cpu.tolist(), "cu_seqlens_cpu"
        if cu_seqlens.device.type == "cpu" or len(offsets) != cu_seqlens.numel():
            check_host_copy(cu_seqlens, cu_seqlens_cpu, tokens)
    check_offsets(name, offsets, tokens)
    return tuple(offsets)


def check_offsets(name: str, offsets: Sequence[int], tokens: int | None = None) -> None:
    """Checks the values of offsets: from 0, never decreasing, up to `tokens` if given."""
    if offsets[0] == 0 and tokens in (None, offsets[-1]) and [*offsets] == sorted(offsets):
        return
    if offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {offsets[0]}")
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {a} then {b} at index {i}")
    if tokens is not None and offsets[-1] != tokens:
        raise ValueError(f"{name} must end at T={tokens}, got {offsets[-1]}")


def token_ranges_of(token_ranges: object) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The given ranges as tuples of Python's integers. Raises ValueError unless they are one list
    of pairs of integers for each rank. Integers of numpy and torch are accepted."""

    def refuse(rule: str, what: object) -> NoReturn:
        raise ValueError(f"token_ranges must {rule}, got {what!r}") from None

    def listed(x: object, rule: str) -> Sequence[Any]:
        if isinstance(x, str | bytes | Mapping | Set):
            refuse(rule, x)
        try:
            return list(x)  # type: ignore[call-overload]
        except TypeError:
            refuse(rule, x)

    def integer(x: object, pair: object) -> int:
        if (number := _integer(x)) is None:
            refuse("hold [start, stop) of two integers", pair)
        return number

    ranges = []
    for own in listed(token_ranges, "have one list of [start, stop) per rank"):
        pairs = []
        for pair in listed(own, "have one list of [start, stop) per rank"):
            if _integer(pair) is not None:  # [(0, 10)] for [[(0, 10)]]
                raise ValueError(
                    "token_ranges must have one list of [start, stop) per rank, got "
                    f"{own!r} in place of a rank's list"
                )
            ends = listed(pair, "hold [start, stop) of two integers")
            if len(ends) != 2:
                refuse("hold [start, stop) of two integers", pair)
            pairs.append((integer(ends[0], pair), integer(ends[1], pair)))
        ranges.append(tuple(pairs))
    return tuple(ranges)


def check_division(total: object, world_size: object) -> tuple[int, int]:
    """The number of tokens and of ranks as Python's integers. Integers of numpy and torch are
    accepted."""
    found = []
    for name, x, least in (("total", total, 0), ("world_size", world_size, 1)):
        number = _integer(x)
        if number is None or number < least:
            raise ValueError(f"{name} must be an integer from {least}, got {x!r}")
        found.append(number)
    return found[0], found[1]


def length_in(x: object, dim: object) -> int | None:
    """The length of a dimension of x, None if x has no such dimension. Raises ValueError if x is no
    tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {type(x).__name__}")
    place = _integer(dim)
    return None if place is None or not -x.ndim <= place < x.ndim else x.shape[place]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def check_token_ranges(
    ranges: Sequence[Sequence[tuple[int, int]]], total: int, world_size: int
) -> None:
    """Checks that there is one list of ranges [start, stop) for each rank, and that together they
    cover each token of [0, total) once."""
    if len(ranges) != world_size:
        raise ValueError(
            f"token_ranges must have one list per rank, got {len(ranges)} for {_ranks(world_size)}"
        )
    at = 0
    for lo, hi, r in sorted((lo, hi, r) for r, own in enumerate(ranges) for lo, hi in own):
        if hi < lo:
            raise ValueError(f"token_ranges must be [start, stop), got [{lo}, {hi}) on rank {r}")
        if lo != at and hi > lo:
            kind = "a gap" if lo > at else "an overlap"
            raise ValueError(
                f"token_ranges must tile [0, {total}) once, but there is {kind} at token "
                f"{min(lo, at)}: [{lo}, {hi}) of rank {r} follows {at}"
            )
        at = max(at, hi)
    if at != total:
        raise ValueError(f"token_ranges must tile [0, {total}) once, but they end at {at}")


def refuse_length(tokens: int, local: int, total: int) -> NoReturn:
    """Raises ValueError for a call with T = tokens on a rank that holds `local` tokens of `total`.
    A call with `total` tokens has one of two mistakes, which cannot be told apart here."""
    hint = ""
    if tokens == total:
        hint = (
            ", which is where cu_seqlens ends. If these are the tokens of the whole batch, pass "
            "cp_context.shard(x). If they are this rank's share, cu_seqlens looks like this rank's "
            "own: give build_cp_context that of the whole batch"
        )
    raise ValueError(
        f"under cp_context the local length must be context.local_tokens={local}, got "
        f"T={tokens}{hint}"
    )


def check_max_sequences(
    most: int, offsets: Sequence[int], world_size: int, token_ranges: object, exchange: str
) -> None:
    """Checks the arguments of a context of fixed shape. most: max_sequences."""
    if not _is_integer(most):
        raise ValueError(f"max_sequences must be an integer, or None, got {most!r}")
    if most < 1:
        raise ValueError(f"max_sequences must be at least 1, or None, got {most}")
    if token_ranges is not None:
        raise ValueError(f"token_ranges must be None with max_sequences, got {token_ranges}")
    if exchange not in ("auto", "all_gather", "symmetric"):
        raise ValueError(
            "exchange must be 'auto', 'all_gather' or 'symmetric' with max_sequences, got "
            f"{exchange!r}"
        )
    if offsets[-1] < world_size:
        raise ValueError(
            f"cu_seqlens must hold a token a rank with max_sequences, got {offsets[-1]} tokens for "
            f"{_ranks(world_size)}"
        )
    check_sequences_fit(most, offsets)


def check_sequences_fit(most: int, offsets: Sequence[int]) -> None:
    """Checks that there are at most `most` sequences."""
    if len(offsets) - 1 > most:
        raise ValueError(
            f"cu_seqlens must have at most max_sequences={most} sequences, got {len(offsets) - 1}"
        )


def _integer(x: object) -> int | None:
    """An integer of Python, numpy or torch as one of Python; None for anything else."""
    if isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == torch.bool):
        return None
    try:
        return operator.index(x)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None


def _is_integer(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def check_exchange(exchange: object) -> None:
    """Checks that the exchange is a string. `make_exchange` checks which one."""
    if not isinstance(exchange, str):
        raise ValueError(
            f"exchange must be the name of a scheme, such as 'auto', got {type(exchange).__name__}"
        )


def check_group(group: Any) -> int:
    """The number of ranks of a context's group, after all checks of it; 1 for None."""
    if group is None:
        return 1
    try:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    except (ValueError, TypeError, AttributeError):
        if isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group must be alive, got {group}, which was destroyed: make it again"
            ) from None
        hint = ": pass mesh.get_group()" if hasattr(group, "get_group") else ""
        raise ValueError(
            "group must be a torch.distributed.ProcessGroup, or None for one rank, got "
            f"{type(group).__name__}{hint}"
        ) from None
    if rank < 0:  # torch gives a process outside the group a number in place of a group
        raise ValueError("group must contain this process, which is not one of its ranks")
    return world_size


def check_conv1d_kernel_size(width: int | None) -> None:
    """Checks W, the width of the convolutions under a context."""
    if width is not None and not _is_integer(width):
        raise ValueError(f"conv1d_kernel_size must be an integer, or None, got {width!r}")
    if width is not None and width < 1:
        raise ValueError(f"conv1d_kernel_size must be at least 1, or None, got {width}")
