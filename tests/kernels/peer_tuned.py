"""Run by test_launch.py without the interpreter: how benchmarks tune a peer's kernels."""

import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from benchmarks.peer_tuning import compiled_side_by_side
from tests.support.driver import idle

CONFIGS = [triton.Config({"N": n}, num_warps=w) for n in (16, 32) for w in (1, 2)]


def scaled(x, y, factor, N: tl.constexpr):
    rows = tl.arange(0, N)
    tl.store(y + rows, tl.load(x + rows) * factor)


def tuned(monkeypatch):
    """Events of a tuned call: ("compiled", thread) and ("timed", None), in order."""
    events, timed = [], Autotuner._bench
    compile_ = triton.compiler.compile

    def compiled(*args, **kwargs):
        events.append(("compiled", threading.get_ident()))
        return compile_(*args, **kwargs)

    def bench(self, *args, **kwargs):
        events.append(("timed", None))
        return timed(self, *args, **kwargs)

    kernel = triton.autotune(CONFIGS, key=[])(triton.jit(scaled))
    monkeypatch.setattr(Autotuner, "_bench", bench)
    monkeypatch.setattr(triton.compiler, "compile", compiled)
    x = torch.ones(32)
    kernel[(1,)](x, torch.empty_like(x), factor=2.0)
    return kernel, events


def test_configurations_compile_in_threads_before_one_is_timed(monkeypatch):
    with idle(), compiled_side_by_side():
        kernel, events = tuned(monkeypatch)
    first = [kind for kind, _ in events].index("timed")
    assert len(events[:first]) == len(CONFIGS)
    assert threading.get_ident() not in {thread for _, thread in events[:first]}
    assert {kind for kind, _ in events[first:]} == {"timed"}
    assert set(kernel.configs_timings) == set(CONFIGS)


def test_without_it_they_compile_when_they_are_timed(monkeypatch):
    with idle():
        _, events = tuned(monkeypatch)
    assert events[0] == ("timed", None)


def test_what_does_not_compile_fails_as_it_would(monkeypatch):
    def broken(x, y, N: tl.constexpr):
        tl.static_assert(N == 0)

    kernel = triton.autotune(CONFIGS, key=[])(triton.jit(broken))
    x = torch.ones(32)
    with idle(), compiled_side_by_side(), pytest.raises(triton.CompilationError):
        kernel[(1,)](x, torch.empty_like(x))
