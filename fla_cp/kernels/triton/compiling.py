"""Compiles the kernels of a call side by side, and says so if it takes long.

Triton compiles a kernel at its first launch, one after another. But most of that time is spent in
LLVM and in the assembler, which run without Python's global lock. The first launch of a call that
has to compile therefore rehearses the whole call (`fla_cp.kernels.rehearsal`): its launches then
only say what they would compile. A pool of threads compiles all of it, forward and backward, and
builds the launchers, for which Triton 3.6 runs a C compiler.

Environment variables: FLA_CP_COMPILE_THREADS is the number of threads; 1 compiles one kernel after
another, each at its first launch. FLA_CP_COMPILE_PROGRESS=0 says nothing."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from typing import Any

import torch.distributed as dist
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key

from fla_cp.kernels import rehearsal
from fla_cp.tape import paused

Redirect = Callable[[Callable[..., None]], AbstractContextManager[None]]
"""Given `run`, a block in which `run(kernel, grid, *given, **named)` replaces every launch of the
process."""

MAX_THREADS = 16
"""The most threads. A call has fewer than 30 kernels, and some take as long as all others."""

QUIET_S = 3.0
"""Seconds of compiling before it is said."""

LINE_S = 10.0
"""Seconds between lines where there is no terminal."""

PARSES = 5
"""How often a kernel's source is parsed before Python's error about it is raised."""

_log = logging.getLogger(__name__)
_rehearsing = threading.Lock()

# Triton's first key contains a hash of Triton, nearly half a second for 460 MB. It is formed while
# the kernels are imported.
_hashing = threading.Thread(target=triton_key, name="fla_cp-hash")
if not knobs.runtime.interpret:
    _hashing.start()


def threads() -> int:
    """How many threads compile: FLA_CP_COMPILE_THREADS, or this process's share of the host's CPUs.

    Raises ValueError if the variable is not a positive number.
    """
    wanted = os.environ.get("FLA_CP_COMPILE_THREADS")
    if wanted is None:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0)) // ranks))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"FLA_CP_COMPILE_THREADS must be a positive number, got {wanted!r}")
    return int(wanted)


def first_launch(
    kernel: Any, grid: tuple[int, ...], given: tuple, named: dict[str, Any], redirect: Redirect
) -> Any:
    """Launches as `kernel[grid](*given, **named)` does, and returns what was compiled. If Triton
    has to compile it, the other kernels of the announced call are compiled at the same time."""
    if _hashing.is_alive():
        _hashing.join()

    def run() -> Any:
        with suppress(RuntimeError):  # the caller has a mode of this kind
            _SideBySide(redirect).__enter__()
        return kernel[grid](*given, **named)

    # The mode ends with the context; its own end takes as long as the launch.
    compiled = copy_context().run(run)
    return compiled.result() if isinstance(compiled, FutureKernel) else compiled


class _SideBySide(AsyncCompileMode):
    """While it is active, Triton hands it each kernel that it would compile in this thread.

    The first one is a real launch: it rehearses the call, waits for everything and returns the
    kernel. Those that come meanwhile are of the rehearsal, and only start. If one of these fails,
    its launch raises.
    """

    def __init__(self, redirect: Redirect) -> None:
        super().__init__(None)
        self.redirect, self.rehearsing = redirect, False

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Any:
        work = functools.partial(_compiled, compile_fn)
        if self.rehearsing:
            return super().submit(key, work, finalize_fn)
        if (count := threads()) == 1:
            kernel = _parsed(compile_fn)
            finalize_fn(kernel)
            return kernel
        with ThreadPoolExecutor(count, "fla_cp-compile") as pool:
            self.executor, self.rehearsing = pool, True
            first: FutureKernel = super().submit(key, work, finalize_fn)
            self._rehearse()
            _wait(self.raw_futures)
        for kernel in self.future_kernels.values():
            kernel.result(ignore_errors=True)
        return first.result()

    def _rehearse(self) -> None:
        call, thread = rehearsal.take(), threading.get_ident()
        if call is None:
            return

        def collect(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
            if threading.get_ident() == thread:
                kernel.run(*given, grid=grid, warmup=True, **named)
            else:  # another thread launches in earnest
                kernel[grid](*given, **named)

        with _rehearsing, self.redirect(collect), paused():
            try:
                call()
            except Exception:  # what it did not find is compiled when it is launched
                _log.warning("a call could not be rehearsed", exc_info=True)


def _compiled(compile_fn: Callable[[], Any]) -> Any:
    """A compiled kernel, whose launcher is built and in Triton's cache."""
    kernel = _parsed(compile_fn)
    build = getattr(driver.active, "launcher_cls", None)
    if build is not None:
        build(kernel.src, kernel.metadata)
    return kernel


def _parsed(compile_fn: Callable[[], Any]) -> Any:
    """What `compile_fn` returns. It is called again if Python before 3.11.8, or 3.12 before 3.12.2,
    counts the depth of two threads' syntax trees as one (CPython issue 106905), which is rare. For
    a function that a kernel calls, Triton raises an error of its own that this one has caused."""
    for _ in range(PARSES - 1):
        try:
            return compile_fn()
        except Exception as error:
            if not _miscounted(error):
                raise
    return compile_fn()


def _miscounted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SystemError) and "AST constructor recursion depth" in str(error):
            return True
        error = error.__cause__
    return False


def _wait(futures: list[Future]) -> None:
    left, started, said = set(futures), time.monotonic(), _Progress()
    while left:
        _, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
        if left and time.monotonic() - started > QUIET_S:
            said.show(len(futures) - len(left), len(futures))
    said.close()


class _Progress:
    """Says on stderr, on rank 0, how many kernels are compiled: in one line that changes if it is a
    terminal, otherwise in a line every few seconds."""

    def __init__(self) -> None:
        rank = os.environ.get("RANK", "0")
        if dist.is_available() and dist.is_initialized():
            rank = str(dist.get_rank())
        self.on = rank == "0" and os.environ.get("FLA_CP_COMPILE_PROGRESS", "1") != "0"
        self.width, self.at = 0, -LINE_S

    def show(self, done: int, of: int) -> None:
        if not self.on:
            return
        text, bars = f"fla_cp: compiling {done} of {of} kernels", _bars()
        if sys.stderr.isatty() and bars is None:
            sys.stderr.write(f"\r{text}")
            self.width = len(text)
        elif time.monotonic() - self.at >= LINE_S:
            self.at = time.monotonic()
            (print if bars is None else bars.write)(text, file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()


def _bars() -> Any:
    """tqdm's class if bars are on the terminal, which its `write` leaves intact."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bars if bars is not None and getattr(bars, "_instances", None) else None
