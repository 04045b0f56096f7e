"""Runs tests with other kernels and tiles than the default ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import fla_cp.kernels
from benchmarks.tune import now
from fla_cp.kernels.triton.backend import TritonBackend


def variant(**fields: Any) -> TritonBackend:
    """The current Triton backend with other values in its `Tuning`."""
    backend = now()
    return replace(backend, tuning=replace(backend.tuning, **fields))


@contextmanager
def tuned(**fields: Any) -> Iterator[None]:
    """In the block, public calls on Triton use `variant(**fields)`."""
    with fla_cp.kernels.using(variant(**fields)):
        yield


def tune(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Makes public calls on Triton use `variant(**fields)` until the end of the test."""
    monkeypatch.setitem(fla_cp.kernels._replaced, "triton", variant(**fields))
