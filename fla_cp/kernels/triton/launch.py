"""Launches that remember what they compiled.

Triton inspects every argument at each launch. For a small kernel, that takes the host longer than
the kernel takes the GPU."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fla_cp.kernels.triton.compiling import first_launch
from fla_cp.kernels.triton.device.bundles import BY_VALUE, CONSTANTS
from fla_cp.tape import active
from fla_cp.tape_items import OfAddress

runner: Callable[..., None] | None = None
"""Tests that record or skip launches set this: it is then called in place of every launch, as
`runner(kernel, grid, *given, **named)`."""

INTERPRETED = knobs.runtime.interpret
"""Whether kernels were defined for Triton's interpreter, which has no launches to replay."""

MAX_REMEMBERED = 4096
"""The most compiled kernels that are remembered; then all are forgotten."""

_known: dict[tuple, tuple[Any, tuple[str, ...]]] = {}


@contextmanager
def redirected(run: Callable[..., None]) -> Iterator[None]:
    """In the block `run` is the `runner`."""
    global runner
    before, runner = runner, run
    try:
        yield
    finally:
        runner = before


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def for_compiler(x: Any) -> Any:
    """x, and if it is a bundle of constants, with its members as the compiler takes them; an
    interpreted kernel takes them as they are."""
    members: Any = x
    return members._make(map(constexpr, members)) if x.__class__ in CONSTANTS else x


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> Any:
    """`kernel[grid](*given, **named)`, for kernels without default arguments. Returns the compiled
    kernel; None if launches are interpreted or redirected."""
    interpreted = not isinstance(kernel, JITFunction)
    if interpreted or runner is not None:
        if not interpreted:
            given = tuple(map(for_compiler, given))
            named = {name: for_compiler(x) for name, x in named.items()}
        tape = active()
        if tape is not None:
            tape.failed = "another thread watched the launches"
        if runner is None:
            kernel[grid](*given, **named)
        else:
            runner(kernel, grid, *given, **named)
        return None
    device = driver.active.get_current_device()
    # an id stays taken: what was compiled holds on to its functions
    parts = [id(kernel), device, *named]
    specialization_key(parts, given)
    specialization_key(parts, named.values())
    key = tuple(parts)
    found, tape = _known.get(key), active()
    if found is None:
        first = {name: for_compiler(x) for name, x in named.items()}
        values = tuple(map(for_compiler, given))
        compiled = first_launch(kernel, grid, values, first, redirected)
        if len(_known) >= MAX_REMEMBERED:
            _known.clear()
        rest = tuple(kernel.arg_names[len(given) :])
        _known[key] = compiled, rest
        args = (*given, *map(named.__getitem__, rest))
    else:
        compiled, rest = found
        args = (*given, *map(named.__getitem__, rest))
        stream = driver.active.get_current_stream(device)
        compiled[(*grid, 1, 1)[:3]](*args, stream=stream)
    if tape is not None:
        bare, args = without_descriptors(compiled, args)
        stream = driver.active.get_current_stream(device)
        tape.add_launch((bare, _fixed(compiled)), grid, args, stream)
    return compiled


def launcher(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The launcher of a compiled kernel without descriptors, and what it takes between the stream
    and the kernel's own arguments. It may be called with addresses in place of tensors, if they are
    multiples of 16 where those of the first launch were."""
    return compiled.run, _fixed(compiled)


def _fixed(compiled: Any) -> tuple[Any, ...]:
    return compiled.function, compiled.packed_metadata, None, None, None


def current_stream() -> int | None:
    """The address of the current stream; None if launches are interpreted or watched."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if INTERPRETED or runner is not None or any(getattr(h, "calls", h) for h in hooks):
        return None
    stream: int = driver.active.get_current_stream(driver.active.get_current_device())
    return stream


class _Address(NamedTuple):
    """The memory of a descriptor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


MAX_TENSOR_MAPS = 128
"""The most addresses for which descriptors of one kind are kept; then all are made again."""


class TensorMaps:
    """Makes the arguments that stand for a descriptor, and keeps them by address, because memory is
    often where it was in an earlier call. meta: Triton's, of the compiled kernel; None where the
    launcher takes the descriptor itself."""

    def __init__(self, described: Any, meta: Any) -> None:
        self.kind, self.facts = type(described), dict(vars(described), base=None)
        self.meta, self.many = meta, meta is not None
        self.found: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        found = self.found.get(address)
        if found is None:
            if len(self.found) >= MAX_TENSOR_MAPS:
                self.found.clear()
            found = object.__new__(self.kind)  # copy.copy would take twice as long
            found.__dict__.update(self.facts)
            found.base = _Address(address)
            if self.many:
                found = make_tensordesc_arg(found, self.meta)
            self.found[address] = found
        return found


_maps: WeakValueDictionary[str, TensorMaps] = WeakValueDictionary()


def tensor_maps(described: Any, meta: Any) -> TensorMaps:
    """The `TensorMaps` of a descriptor. Programs whose descriptors differ in the address alone have
    the same, so that a new program, for another number of documents, finds what others have made.
    """
    facts = {name: x for name, x in vars(described).items() if name != "base"}
    key = repr((type(described), facts, meta))
    found = _maps.get(key)
    if found is None:
        found = _maps[key] = TensorMaps(described, meta)
    return found


def without_descriptors(compiled: Any, args: tuple) -> tuple[Any, tuple]:
    """The launcher of a compiled kernel, and the arguments for it. A launcher that encodes
    descriptors at every launch is replaced by the one that it hands them to."""
    run = compiled.run
    if not any(hasattr(x, "block_shape") for x in args):
        return run, args
    inner = getattr(getattr(run, "launch", None), "__closure__", None)
    names = run.launch.__code__.co_freevars if inner else ()
    metas: Any = iter(())
    if inner and {"launcher", "tensordesc_meta"} <= set(names):
        cells = dict(zip(names, inner, strict=True))
        run = copy.copy(run)
        run.launch = cells["launcher"].cell_contents
        metas = iter(cells["tensordesc_meta"].cell_contents)
    return run, tuple(
        OfAddress(x.base, tensor_maps(x, next(metas, None))) if hasattr(x, "block_shape") else x
        for x in args
    )


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
