"""Launches that remember what they compiled.

Triton looks at every argument again at each launch, which takes the host longer than a small kernel
takes the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fla_cp.kernels.triton.device.bundles import CONSTANTS

runner: Callable[..., None] | None = None
"""Takes the place of every launch, `runner(kernel, grid, *given, **named)`: for tests that record
launches, or that leave them out."""

MAX_REMEMBERED = 4096
"""The most compiled kernels that are remembered; then all are forgotten."""

PLAIN = frozenset((int, str, bool, tuple, type(None)))
"""Types of arguments that are compared by value."""

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
    values = (*given, *named.values())
    # an id stays taken: what was compiled holds on to its functions
    key = (
        id(kernel),
        device,
        *named,
        *[x if x.__class__ in PLAIN else specialization_key(x) for x in values],
    )
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


def specialization_key(x: Any) -> Any:
    """Kernels are compiled alike for two arguments, neither of them PLAIN, whose keys are equal."""
    if isinstance(x, Tensor):
        return (x.dtype,) if x.data_ptr() % 16 else x.dtype
    if isinstance(x, tuple):
        if x.__class__ in CONSTANTS:
            return x
        return tuple([y if y.__class__ in PLAIN else specialization_key(y) for y in x])
    if x.__class__ is float:
        return (x,)  # unlike an int
    return id(x) if isinstance(x, JITFunction) else x.kind
