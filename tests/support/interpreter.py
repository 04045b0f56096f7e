"""Triton's interpreter without work that it repeats in vain, which took half of its time."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Scope:
    """What a launch undoes at its end."""

    def __init__(self, changes: Any, done: set[int]):
        self.changes, self.done = changes, done

    def restore(self) -> None:
        self.done.clear()
        if self.changes is not None:
            self.changes.restore()


def patched_once(patch: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Scope]:
    """`patch`, which changes the language that a function's module sees, once a launch and module.

    The interpreter calls it at every call of a function of a kernel. Nothing is undone before the
    launch ends, so that all but the first calls change nothing.
    """
    done: set[int] = set()

    def once(fn: FunctionType) -> Scope:
        module = id(fn.__globals__)
        changes = None if module in done else patch(fn)
        done.add(module)
        return Scope(changes, done)

    return once


def remembered(dtype_of: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """`dtype_of`, which makes a table of all dtypes at each call, once for each dtype."""
    known: dict[str, Any] = {}

    def found(dtype: tl.dtype) -> Any:
        of = dtype.scalar
        if of.is_ptr():
            return dtype_of(of)
        if of.name not in known:
            known[of.name] = dtype_of(of)
        return known[of.name]

    return found


def hasten() -> None:
    """Changes the interpreter of this process; what it computes stays the same."""
    if getattr(interpreter._patch_lang, "__name__", "") != "once":
        interpreter._patch_lang = patched_once(interpreter._patch_lang)
        interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
