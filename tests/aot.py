"""Compiling the kernels for sm_90 without a GPU, exactly as the package would launch them.

Inside `compiled()`, Triton targets sm_90 and every launch compiles its kernel and returns, so an
operator called on CPU tensors goes through the package's own launch code; the numbers it returns
mean nothing. Each compiled kernel is recorded with its registers, spills and shared memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SM90_SHARED = 227 * 1024
"""Bytes of shared memory that one block may use."""


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel. spills: bytes. shared: bytes of a block."""

    kernel: str
    registers: int
    spills: int
    shared: int
    warps: int
    wgmma: int
    mma: int


class _Sm90:
    """Stands in for the CUDA driver: names a target and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> object:
        return torch.cuda

    def get_benchmarker(self) -> object:
        return lambda fn, *args, **kwargs: [1.0, 1.0, 1.0]

    @classmethod
    def is_active(cls) -> bool:
        return True


@contextmanager
def compiled(seen: dict[object, Compiled] | None = None) -> Iterator[list[Compiled]]:
    """Records what each launch in the block compiles to; `seen` spares a second reading."""
    results: list[Compiled] = []
    cache = {} if seen is None else seen
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in cache:
            cache[kernel.hash] = resources(kernel)
        results.append(cache[kernel.hash])
        return kernel

    active = driver._active  # the property would look for a GPU
    driver.set_active(_Sm90())
    JITFunction.run = compile_only
    try:
        yield results
    finally:
        JITFunction.run = run
        driver._active = active


def resources(kernel) -> Compiled:
    """Registers, spills and shared memory of a compiled kernel, read from its PTX by ptxas."""
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name", target, file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"mma\.sync", ptx)),
    )
