"""An interpreter for the Gluon kernels of fla_cp/kernels on CPU tensors, of any dtype.

Triton's own interpreter cannot run Gluon. Inside `interpreted()`, a launch runs the kernel's Python
once for each program. Tiles are tensors, and layouts are ignored. The partitions of a
warp-specialised program are threads, which wait for each other at barriers that count arrivals and
bytes as the hardware does. Copies are done at once, so it cannot show that a buffer is overwritten
while a copy still reads it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

SECONDS = 20
"""Time after which a wait counts as a deadlock."""


class Pointers:
    """Addresses of elements of a tensor's memory."""

    def __init__(self, base: Tensor, at: Any = 0):
        self.base, self.at = base, at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> Pointers:
        return Pointers(self.base, self.at + offset)

    def __getitem__(self, index: Any) -> Pointers:
        return Pointers(self.base, torch.as_tensor(self.at)[index])

    def memory(self) -> Tensor:
        size = self.base.untyped_storage().nbytes() // self.base.element_size()
        return torch.as_strided(self.base, (size,), (1,), 0)

    def places(self) -> Tensor:
        return torch.as_tensor(self.at) + self.base.storage_offset()


class Described:
    """A tensor descriptor: blocks of a tensor in two dimensions, zero outside the tensor."""

    def __init__(self, x: Any):
        self.base, self.block, self.dtype, self.layout = x.base, x.block_shape, x.base.dtype, None
        self.shape, self.strides = x.shape, x.strides
        # Vectors are fp32. Tiles count as halves in any dtype, as kernels count them.
        width = 4 if self.block[0] == 1 else 2
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block) * width)

    def _window(self, at: list[Any]) -> tuple[Tensor, tuple[slice, slice]]:
        whole = torch.as_strided(self.base, self.shape, self.strides, self.base.storage_offset())
        ends = [min(int(a) + n, size) for a, n, size in zip(at, self.block, self.shape)]  # noqa: B905
        window = whole[int(at[0]) : ends[0], int(at[1]) : ends[1]]
        return window, (slice(0, window.shape[0]), slice(0, window.shape[1]))

    def load(self, at: list[Any]) -> Tensor:
        window, places = self._window(at)
        block = torch.zeros(*self.block, dtype=self.dtype)
        block[places] = window
        return block

    def store(self, at: list[Any], block: Tensor) -> None:
        window, places = self._window(at)
        window.copy_(block[places])


class Shared:
    """Shared memory. In an int64 one, each row is a barrier."""

    def __init__(self, x: Tensor, barriers: list[Barrier] | None = None):
        self.x, self.barriers, self.dtype, self.shape = x, barriers, x.dtype, list(x.shape)

    def index(self, i: Any) -> Any:
        return Shared(self.x[int(i)]) if self.barriers is None else self.barriers[int(i)]

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.x.permute(*order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.x.view(*shape))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        """The same memory; elements of half precision are fp32 here and so take more than they
        need.
        """
        flat = self.x.view(-1).view(dtype)[: math.prod(shape)]
        return Shared(flat.view(*shape))

    def load(self, layout: Any) -> Tensor:
        return self.x.clone()

    def store(self, x: Tensor) -> None:
        assert x.shape == self.x.shape and x.dtype == self.x.dtype
        self.x.copy_(x)


class Barrier:
    """An mbarrier: a phase ends once all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.arrived = self.bytes = self.phases = 0
        self.used = False

    def step(self, *, arrived: int = 0, size: int = 0) -> None:
        self.used = True
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrived, self.bytes + size
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phases = 0, self.phases + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        self.used = True
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phases % 2 != int(parity), SECONDS)
        assert ended, "deadlock at a barrier"


made: list[list[Barrier]] = []
"""The barriers of a program, one list for each of its allocations."""


def _unused_barriers() -> set[int]:
    """The allocations of a program's barriers that it initialised and did not use, by number."""
    return {i for i, bars in enumerate(made) if bars[0].count and not any(bar.used for bar in bars)}


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    memory = torch.full(shape, float("nan") if dtype.is_floating_point else 10**6, dtype=dtype)
    barriers = [Barrier() for _ in range(shape[0])] if dtype == torch.int64 else None
    if barriers:
        made.append(barriers)
    return Shared(memory, barriers)


def _load(
    p: Pointers,
    mask: Tensor | None = None,
    other: float = 0.0,
    volatile: bool = False,
    cache_modifier: str = "",
) -> Tensor:
    if mask is None:
        return p.memory()[p.places()]
    places, keep = torch.broadcast_tensors(p.places(), mask)
    x = torch.full(places.shape, other, dtype=p.base.dtype)
    x[keep] = p.memory()[places[keep]]
    return x


def _store(p: Pointers, x: Tensor | float, mask: Tensor | None = None) -> None:
    x = torch.as_tensor(x).to(p.base.dtype)
    places, x = torch.broadcast_tensors(p.places(), x)
    keep = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand_as(places)
    p.memory()[places[keep]] = x[keep]


def _atomic_add(p: Pointers, x: int) -> Tensor:
    before = _load(p).clone()
    _store(p, before + x)
    return before


def _at_address(address: Tensor, dtype: torch.dtype) -> Pointers:
    """Elements from an address on; nothing checks how many there are."""
    memory = (ctypes.c_char * (1 << 30)).from_address(int(address))
    return Pointers(torch.frombuffer(memory, dtype=dtype))


def _arrived(p: Pointers, epoch: Tensor, held: int, vectors: bool) -> Tensor:
    """Words that must be there: nothing else runs meanwhile."""
    words = p.memory()[p.places()]
    assert (words >> 32 == epoch).all(), "waits for words that are not written"
    return words


def _products(acc: Tensor, w: Tensor, x: Tensor, L: Any) -> Tensor:
    """Any numbers whose sums over rows are right."""
    (a, b), (c, d) = ([half.view(torch.float32) for half in (t << 16, t & -65536)] for t in (w, x))
    return acc + a * c + b * d


def _join(a: Any, b: Any) -> Any:
    if isinstance(a, Pointers):
        return Pointers(a.base, torch.stack(torch.broadcast_tensors(a.at, b.at), -1))
    return torch.stack((a, b), -1)


def _prefetch(p: Pointers) -> None:
    """Does nothing but check that the addresses exist."""
    places = p.places()
    assert places.min() >= 0 and places.max() < len(p.memory()), "prefetched outside of a tensor"


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    condition = torch.as_tensor(condition)
    return torch.where(condition, torch.as_tensor(x), torch.as_tensor(y))


def _fma(x: Tensor, y: float, z: Tensor) -> Tensor:
    return (x.double() * y + z.double()).to(x.dtype)


def _sums(x: Tensor, axis: int, add: Any, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def _product(
    a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    a = a.x if isinstance(a, Shared) else a
    wide = torch.promote_types(a.dtype, torch.float32)
    found = a.to(wide) @ b.x.to(wide)
    return (acc + found if use_acc else found).to(acc.dtype)


def _small_product(a: Tensor, b: Tensor, acc: Tensor, input_precision: str | None = None) -> Tensor:
    return acc + a.to(acc.dtype) @ b.to(acc.dtype)


def _copy_rows(place: Shared, at: Pointers, mask: Tensor | None = None) -> None:
    every = torch.tensor(True) if mask is None else mask
    mask, places = torch.broadcast_tensors(every, at.places())
    x = torch.zeros(places.shape, dtype=at.base.dtype)
    x[mask] = at.memory()[places[mask]]
    place.store(x)


def _wait(pending: int, deps: tuple[Tensor, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def _partitions(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    failed: list[BaseException] = []

    def run(fn: Any, args: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad():  # threads do not inherit it
                fn(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * SECONDS)
    if failed:
        raise failed[0]


def _copy_in(x: Described, at: list[Any], bar: Barrier, to: Shared) -> None:
    to.store(x.load(at))
    bar.step(size=-x.block_type.nbytes)


def _argument(x: Any) -> Any:
    """As a kernel sees it; bundles by member."""
    if isinstance(x, Tensor):
        return Pointers(x)
    if isinstance(x, tuple):
        members = map(_argument, x)
        return x._make(members) if hasattr(x, "_make") else tuple(members)
    return Described(x) if hasattr(x, "block_shape") else x


class Launcher:
    """Implements kernel[grid](*arguments) of a Gluon kernel."""

    def __init__(self, fn: Any, where: SimpleNamespace):
        self.fn, self.where = fn, where

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            for option in ("num_warps", "maxnreg", "launch_cooperative_grid", "launch_pdl"):
                named.pop(option, None)
            given = tuple(map(_argument, given))
            named = {name: _argument(x) for name, x in named.items()}
            unused: list[set[int]] = []
            for program in itertools.product(*map(range, grid)):
                self.where.program_id = lambda axis, at=program: torch.tensor(at[axis])
                self.where.num_programs = lambda axis: grid[axis]
                made.clear()
                self.fn(*given, **named)
                unused.append(_unused_barriers())
            # Triton gives the memory of barriers that no program uses to other data, which then
            # change if the GPU turns to another process.
            assert not unused or not set.intersection(*unused), "barriers that nobody uses"

        return launch


@contextmanager
def interpreted() -> Iterator[list[str]]:
    """Runs Gluon kernels on the CPU; yields the list of the names of launched kernels."""
    import fla_cp.kernels.sm90

    modules = [
        importlib.import_module(f"fla_cp.kernels.sm90.{found.name}")
        for found in pkgutil.iter_modules(fla_cp.kernels.sm90.__path__)
    ]
    nothing = lambda *args, **more: None  # noqa: E731
    gl = SimpleNamespace(
        int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        static_range=range,
        allocate_shared_memory=_allocate, load=_load, store=_store, where=_where,
        atomic_add=_atomic_add,
        arange=lambda a, b, layout=None: torch.arange(a, b),
        convert_layout=lambda x, layout, **more: x,
        full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype),
        warp_specialize=_partitions, NVMMADistributedLayout=nothing, SliceLayout=nothing,
        DotOperandLayout=nothing, BlockedLayout=nothing, exp=torch.exp, exp2=torch.exp2,
        SwizzledSharedLayout=nothing,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis), abs=torch.abs,
        num_warps=nothing,
        reduce=lambda tiles, axis, add: tuple(x.sum(axis) for x in tiles),
        associative_scan=_sums, fma=_fma,
        maximum=lambda x, y: torch.maximum(x, torch.as_tensor(y, dtype=x.dtype)),
        minimum=lambda x, y: torch.minimum(x, torch.as_tensor(y, dtype=x.dtype)),
        floor=torch.floor, rsqrt=torch.rsqrt, log=torch.log, log2=torch.log2, reshape=torch.reshape,
        permute=torch.permute, DistributedLinearLayout=nothing,
        split=lambda x: x.unbind(-1), join=_join, broadcast=torch.broadcast_tensors,
        cast=lambda x, dtype, bitcast: x.view(dtype),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda bar, count: setattr(bar, "count", count),
        wait=Barrier.wait,
        expect=lambda bar, size: bar.step(arrived=1, size=size),
        arrive=lambda bar, count: bar.step(arrived=count),
    )
    tma = SimpleNamespace(
        async_copy_global_to_shared=_copy_in,
        async_copy_shared_to_global=lambda x, at, block: x.store(at, block.x),
        store_wait=nothing,
    )
    async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy_rows, commit_group=nothing, wait_group=nothing
    )
    launched: list[str] = []
    changed = {
        "gl": gl, "mbarrier": mbarrier, "tma": tma, "warpgroup_mma": _product,
        "warpgroup_mma_wait": _wait, "fence_async_shared": nothing, "barrier": nothing,
        "async_copy": async_copy, "mma_v2": _small_product, "to_l2": _prefetch,
        "upcast": lambda x: x.to(torch.float32),
        "at_address": _at_address, "arrived": _arrived, "products": _products,
        "wanted": lambda acc, L: acc, "allow_next": nothing, "wait_for_last": nothing,
    }  # fmt: skip
    changed["range"] = lambda *ends: map(torch.tensor, range(*map(int, ends)))
    before = []
    for module in modules:
        kernels = {}
        for name, kernel in vars(module).items():
            if isinstance(kernel, constexpr):
                kernels[name] = kernel.value
            elif type(kernel).__name__ in ("JITFunction", "InterpretedFunction"):  # from triton/
                if not name.endswith("_kernel"):  # those have an interpreter of their own
                    kernels[name] = kernel.fn
            elif type(kernel).__name__ == "GluonJITFunction":
                kernels[name] = kernel.fn
                if name.endswith("_kernel"):
                    kernels[name] = Launcher(_noted(kernel.fn, name, launched), gl)
        for name, value in (kernels | changed).items():
            before.append((module, name, vars(module).get(name)))
            setattr(module, name, value)
    try:
        yield launched
    finally:
        for module, name, value in before:
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _noted(fn: Any, name: str, launched: list[str]) -> Any:
    def run(*given: Any, **named: Any) -> None:
        launched.append(name)
        fn(*given, **named)

    return run
