"""Triton's interpreter, made faster: its results and what it leaves behind stay the same."""

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

import triton.language as tl
from triton.runtime import interpreter

from tests.support.interpreter import patched_once, remembered


@interpreter.InterpretedFunction
def doubled(x):
    return x + x


@interpreter.InterpretedFunction
def doubled_sums(x, y, N: tl.constexpr):
    row = tl.program_id(0)
    at = row * N + tl.arange(0, N)
    tl.static_assert(N < 100)
    tl.store(y + row, doubled(tl.sum(doubled(tl.load(x + at)))))


def names():
    """What kernels see of the language."""
    return {(m, n): v for m in (tl, tl.tensor, tl.math) for n, v in vars(m).items()}


def test_the_language_is_changed_once_a_launch_and_undone(monkeypatch):
    calls, patch = [], interpreter._patch_lang

    def counted(fn):
        calls.append(fn.__globals__["__name__"])
        return patch(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", patched_once(counted))
    x, y = torch.arange(24.0).view(3, 8), torch.zeros(3)
    left = []
    for launch in (1, 2, 3):
        doubled_sums[(3,)](x, y, 8)
        assert torch.equal(y, 4 * x.sum(1))
        assert calls.count(__name__) == calls.count("triton.language.standard") == launch
        left.append(names())
    with pytest.raises(interpreter.InterpreterError, match="AssertionError"):
        doubled_sums[(3,)](x, y, 128)
    left.append(names())
    assert all(found == left[0] for found in left)
    assert tl.load.__module__ == "triton.language.core"


def test_dtypes_are_those_of_the_table():
    plain = remembered(lambda dtype: str(dtype))
    for dtype in (tl.float32, tl.int1, tl.bfloat16, tl.pointer_type(tl.float32)):
        for of in (dtype, tl.block_type(dtype, [2, 4])):
            expected = dtype.name if not dtype.is_ptr() else str(dtype)
            assert plain(of) == expected
            assert interpreter._get_np_dtype(of) == interpreter._get_np_dtype(dtype)
