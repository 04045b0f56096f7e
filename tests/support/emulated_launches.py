"""Launches of Gluon kernels, compiled for sm_90 and run by an emulator on the CPU.

One process compiles the kernels that a call launches (`compiled_launches`). Another one, in which
kernels are interpreted, makes the same call (`compared`): each launch runs in the interpreter of
Gluon kernels, and then as compiled on copies of the same tensors.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support.processes import ROOT, environment
from tests.support.ptx_async import AsyncProgram
from tests.support.ptx_emulator import Array, Buffer, as_tf32

INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}


class Compiled(NamedTuple):
    """A kernel. shared: bytes of shared memory. kinds: those of its arguments, the members of
    bundles one by one; "constexpr" if the compiled kernel does not take them."""

    name: str
    ptx: str
    shared: int
    kinds: list[str]


class Launched(NamedTuple):
    """A launch. given: tensors among the arguments, by name, as the interpreter leaves them. found:
    as the compiled kernel does. stored: which of their elements the interpreter stored.
    times_written: how often the compiled kernel did. conflicts: how many accesses of shared memory
    wait for each other, in all programs."""

    name: str
    given: dict[str, Tensor]
    found: dict[str, Tensor]
    stored: dict[str, Tensor]
    times_written: dict[str, Array]
    conflicts: int


def flat(x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The members of bundles, with their names."""
    if not isinstance(x, tuple):
        yield name, x
        return
    for part, member in zip(getattr(x, "_fields", itertools.count()), x, strict=False):
        yield from flat(member, f"{name}.{part}" if name else str(part))


def compiled_launches(call: Callable[[], object]) -> list[Compiled]:
    """The Gluon kernels that a call launches, none of which runs."""
    from triton.runtime import driver

    from fla_cp.kernels.triton import launch as launches
    from tests.support.driver import Sm90Driver

    found: list[Compiled] = []

    def run(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        if not kernel.is_gluon():
            return
        result = kernel.warmup(*given, grid=grid, **named)
        kinds = [kind for _, kind in flat(tuple(result.src.signature.values()))]
        ptx, data = result.asm["ptx"], result.metadata
        found.append(Compiled(kernel.__name__, ptx, data.shared, kinds))

    driver.set_active(Sm90Driver())
    with launches.redirected(run):
        call()
    return found


def compiled_by(module: str, folder: Path, *given: str) -> Any:
    """What `python -m MODULE FILE GIVEN` writes to FILE, in JSON. It is a process of its own, with
    Triton's compiler, since kernels are interpreted in this one. folder: for Triton's cache."""
    clean = environment(TRITON_CACHE_DIR=str(folder))
    clean.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, str(folder / "found.json"), *given]
    result = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads((folder / "found.json").read_text())


def without(kernel: Compiled, *lines: int) -> Compiled:
    """The kernel without these lines of its code."""
    text = kernel.ptx.splitlines()
    for line in lines:
        text[line - 1] = ""
    return kernel._replace(ptx="\n".join(text))


def memory(x: Tensor) -> Tensor:
    """All elements from the first to the last of x, also those between its rows."""
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return torch.as_strided(x, (size if x.numel() else 0,), (1,))


def argument(x: Any) -> Buffer | int:
    """As a compiled kernel takes it."""
    if isinstance(x, Tensor):
        return Buffer(memory(x).view(INTEGERS[x.element_size()]).numpy())
    if isinstance(x, float):
        return int(np.float32(x).view(np.uint32))
    return int(x) % (1 << 32)


def emulate(
    kernel: Compiled, grid: Sequence[int], given: dict[str, Any], lanes: bool = True
) -> tuple[dict[str, Array], int]:
    """Runs all programs of the grid. given: the arguments by name, in the order of kinds. Returns
    how often each element of each tensor was written, and the number of conflicts."""
    taken = {
        name: argument(x)
        for (name, x), kind in zip(given.items(), kernel.kinds, strict=False)
        if kind != "constexpr"
    }
    conflicts = 0
    for at in itertools.product(*map(range, grid)):
        program = AsyncProgram(
            kernel.ptx, list(taken.values()), kernel.shared, at, grid, lanes=lanes
        )
        program.run()
        conflicts += len(program.conflicts)
    written = {name: x.times_written for name, x in taken.items() if isinstance(x, Buffer)}
    return written, conflicts


def step_by_step(a: Tensor, b: Tensor, acc: Tensor, input_precision: str | None = None) -> Tensor:
    """acc + a @ b, in TF32 if it is asked for."""
    if input_precision == "tf32":
        a, b = (torch.from_numpy(as_tf32(t.contiguous().numpy())) for t in (a, b))
    return (acc.double() + a.double() @ b.double()).float()


def compared(call: Callable[[], object], kernels: Sequence[Compiled]) -> list[Launched]:
    """Makes a call, whose launches of Gluon kernels are `kernels`."""
    from fla_cp.kernels.sm90 import intra_channelwise, intra_headwise, inverse
    from fla_cp.kernels.triton import launch as launches
    from tests.support import gluon_interpreter as interpreter

    found: list[Launched] = []
    left = iter(kernels)

    def run(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        if not isinstance(kernel, interpreter.Launcher):
            kernel[grid](*given, **named)
            return
        compiled, arguments = next(left), dict(flat(given))
        tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
        copies = {n: x.detach().clone() for n, x in tensors.items()}
        stored = {
            x.data_ptr(): torch.zeros(len(memory(x)), dtype=torch.bool) for x in tensors.values()
        }
        store = kernel.where.store

        def noted(p: Any, x: Any, mask: Tensor | None = None) -> None:
            store(p, x, mask)
            keep = torch.as_tensor(True if mask is None else mask)
            at, keep = torch.broadcast_tensors(torch.as_tensor(p.at), keep)
            stored[p.base.data_ptr()][at[keep]] = True

        kernel.where.store = noted
        try:
            kernel[grid](*given, **named)
        finally:
            kernel.where.store = store
        assert launched[-1] == compiled.name
        written, conflicts = emulate(compiled, grid, arguments | copies)
        marks = {n: stored[x.data_ptr()] for n, x in tensors.items()}
        results = {n: x.detach().clone() for n, x in tensors.items()}
        each = compiled.name, results, copies, marks, written, conflicts
        found.append(Launched(*each))

    with interpreter.interpreted() as launched, launches.redirected(run):
        for module in (inverse, intra_headwise, intra_channelwise):
            module.mma_v2 = step_by_step
        call()
    assert next(left, None) is None
    return found
