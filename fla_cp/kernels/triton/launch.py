"""Launches that remember what they compiled: Triton looks at every argument again at each launch,
which takes the host longer than a small kernel takes the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

runner: Callable[..., None] | None = None
"""Takes the place of every launch, `runner(kernel, grid, *given, **named)`: for tests that record
launches, or that leave them out."""

MAX_REMEMBERED = 4096
"""Compiled kernels remembered; beyond it all are forgotten."""

PLAIN = frozenset((int, str, bool, tuple, type(None)))
"""Types of arguments that are compared by value."""

_known: dict[tuple, tuple[Any, tuple[str, ...], list]] = {}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """`kernel[grid](*given, **named)`, for kernels without default arguments."""
    if runner is not None:
        runner(kernel, grid, *given, **named)
        return
    if not isinstance(kernel, JITFunction):
        kernel[grid](*given, **named)
        return
    device = driver.active.get_current_device()
    values = (*given, *named.values())
    # an id stays taken: what is remembered holds on to the kernel's functions and constants
    key = (
        id(kernel),
        device,
        *named,
        *[x if x.__class__ in PLAIN else specialization_key(x) for x in values],
    )
    found = _known.get(key)
    if found is None:
        compiled = kernel[grid](*given, **named)
        if len(_known) >= MAX_REMEMBERED:
            _known.clear()
        held = [x for x in values if isinstance(x, tuple)]
        _known[key] = compiled, tuple(kernel.arg_names[len(given) :]), held
        return
    compiled, rest, _ = found
    stream = driver.active.get_current_stream(device)
    compiled[(*grid, 1, 1)[:3]](*given, *map(named.__getitem__, rest), stream=stream)


def specialization_key(x: Any) -> Any:
    """Kernels are compiled alike for two arguments, neither of them PLAIN, whose keys are equal."""
    if isinstance(x, Tensor):
        return (x.dtype,) if x.data_ptr() % 16 else x.dtype
    if isinstance(x, tuple):
        if x and x[0].__class__ is constexpr:
            return id(x)  # see `device.bundles`
        return tuple([y if y.__class__ in PLAIN else specialization_key(y) for y in x])
    if x.__class__ is float:
        return (x,)  # unlike an int
    return id(x) if isinstance(x, JITFunction) else x.kind
