"""Launches that remember what they compiled.

Triton inspects every argument at each launch. For a small kernel, that takes the host longer than
the kernel takes the GPU."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fla_cp.kernels.triton.device.bundles import BY_VALUE, CONSTANTS

runner: Callable[..., None] | None = None
"""Tests that record or skip launches set this: it is then called in place of every launch, as
`runner(kernel, grid, *given, **named)`."""

MAX_REMEMBERED = 4096
"""The most compiled kernels that are remembered; then all are forgotten."""

_known: dict[tuple, tuple[Any, tuple[str, ...]]] = {}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def for_compiler(x: Any) -> Any:
    """x, and if it is a bundle of constants, with its members as the compiler takes them; an
    interpreted kernel takes them as they are."""
    members: Any = x
    return members._make(map(constexpr, members)) if x.__class__ in CONSTANTS else x


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """`kernel[grid](*given, **named)`, for kernels without default arguments."""
    interpreted = not isinstance(kernel, JITFunction)
    if interpreted or runner is not None:
        if not interpreted:
            given = tuple(map(for_compiler, given))
            named = {name: for_compiler(x) for name, x in named.items()}
        if runner is None:
            kernel[grid](*given, **named)
        else:
            runner(kernel, grid, *given, **named)
        return
    device = driver.active.get_current_device()
    # an id stays taken: what was compiled holds on to its functions
    parts = [id(kernel), device, *named]
    specialization_key(parts, given)
    specialization_key(parts, named.values())
    key = tuple(parts)
    found = _known.get(key)
    if found is None:
        first = {name: for_compiler(x) for name, x in named.items()}
        compiled = kernel[grid](*map(for_compiler, given), **first)
        if len(_known) >= MAX_REMEMBERED:
            _known.clear()
        _known[key] = compiled, tuple(kernel.arg_names[len(given) :])
        return
    compiled, rest = found
    stream = driver.active.get_current_stream(device)
    compiled[(*grid, 1, 1)[:3]](*given, *map(named.__getitem__, rest), stream=stream)


def specialization_key(parts: list[Any], values: Iterable[Any]) -> None:
    """Appends to `parts` what tells kernels apart: they are compiled alike for two lists of
    arguments for which the same is appended."""
    for x in values:
        kind = x.__class__
        if kind in BY_VALUE:
            parts.append(x)
        elif isinstance(x, Tensor):
            parts.append((x.dtype,) if x.data_ptr() % 16 else x.dtype)
        elif isinstance(x, tuple):
            parts += (kind, len(x))
            specialization_key(parts, x)
        elif kind is float:
            parts.append((x,))  # unlike an int
        else:
            parts.append(id(x) if isinstance(x, JITFunction) else x.kind)
