"""Compiling the kernels for sm_90 without a GPU, exactly as the package would launch them.

`python -m tests.aot` compiles one KDA call of each row of SHAPES and prints what it took; it fails
on an error or over the shared memory of a block.

Inside `compiled()`, Triton targets sm_90 and every launch compiles its kernel and returns, so an
operator called on CPU tensors goes through the package's own launch code; the numbers it returns
mean nothing. Each compiled kernel is recorded with its registers, spills and shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
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

    import fla_cp.ops.kda
    from fla_cp.kernels.backend import TRITON

    resolve = fla_cp.ops.kda.resolve  # would refuse tensors on the CPU
    fla_cp.ops.kda.resolve = lambda *args: TRITON
    active = driver._active  # the property would look for a GPU
    driver.set_active(_Sm90())
    JITFunction.run = compile_only
    try:
        yield results
    finally:
        JITFunction.run = run
        driver._active = active
        fla_cp.ops.kda.resolve = resolve


def resources(kernel) -> Compiled:
    """Registers, spills and shared memory of a compiled kernel, read from its PTX by ptxas."""
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", target, file.name, "-o", "/dev/null"]
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


INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
SAFE = {"safe_gate": True, "lower_bound": -5.0}
SHAPES = ((64, 64, SAFE), (128, 128, SAFE), (128, 128, {}), (256, 256, SAFE))
"""K, V and gate of the calls that are compiled, in bf16."""


def compile_call(K: int, V: int, gate: dict) -> list[Compiled]:
    """Every kernel of one forward and backward, each once."""
    from fla_cp import chunk_kda

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)

    packed = [leaf(1, 65, 1, K), leaf(1, 65, 1, K), leaf(1, 65, 1, V), leaf(1, 65, 1, K)]
    rates = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(K)}
    rates = {n: t.requires_grad_() for n, t in rates.items()}
    with compiled() as kernels:
        o, _ = chunk_kda(*packed, leaf(1, 65, 1), **rates, **INSIDE, **gate, impl="triton")
        o.float().sum().backward()
    return list(dict.fromkeys(kernels))


def main() -> int:
    too_large = 0
    wanted = SHAPES[: int(sys.argv[1])] if len(sys.argv) > 1 else SHAPES
    for K, V, gate in wanted:
        for kernel in compile_call(K, V, gate):
            print(f"K={K} V={V} {'safe' if gate else 'any'} {kernel}", flush=True)
            too_large += kernel.shared > SM90_SHARED
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
