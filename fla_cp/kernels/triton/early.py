"""Kernels that start before the one ahead of them has ended (programmatic dependent launch), in a
decoding step. Where cuBLAS computes the products of layers, no kernel does: a step of 64 sequences
in bf16 took 2% less without (one H200).

Such a kernel allows the next one to start with its first instruction, unless no such kernel follows
(argmax.py). It may then read what the step has not written yet: weights that it does not cast, and
what the step before has left, namely windows, states and what these lack. It has to wait until the
kernel ahead has ended before it reads or writes anything else. Since every such kernel waits, the
end of one means that all kernels before it have ended. Launches of other libraries wait for
everything before them, and what follows waits for them; one of them, the lookup of the tokens'
embeddings, stands between two steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fla_cp.kernels.triton.launch import INTERPRETED, launch

EARLY = True
"""Whether kernels of a decoding step start early, on GPUs from sm_90 on. `python -m
benchmarks.decode` measures a step without it, too."""


def starts_early(x: Tensor) -> bool:
    """Whether kernels on the device of x start early. The interpreter has no such launches."""
    if not EARLY or INTERPRETED:
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)


def launch_early(
    kernel: object,
    grid: tuple[int, ...],
    *given: object,
    early: bool,
    num_warps: int,
    maxnreg: int | None = None,
) -> None:
    """Launches a kernel, with `early` so that it may start before the one ahead has ended. maxnreg:
    the most registers of a thread."""
    more: dict[str, int] = {"launch_pdl": True} if early else {}
    if maxnreg is not None:
        more["maxnreg"] = maxnreg
    launch(kernel, grid, *given, num_warps=num_warps, **more)


@triton.jit
def allow_next(EARLY: tl.constexpr):
    """Allows the next kernel to start once all programs of this one have come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Waits until the kernel ahead has ended and its results are there."""
    if EARLY:
        gdc_wait()
