"""Sweeps over many cases: which of them `make test` runs, and which only `make test-rest` runs.

In a sweep all but a few cases have the marker `wide`. The others contain every value of every axis
at least once, so that `make test` finds what a single value breaks; `make test-rest` finds what
only a combination breaks.
"""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def some(cases: Iterable[Any], fast: Collection[str]) -> list[Any]:
    """The cases as parameters; all but those named in `fast` are wide. Cases have a `name`."""
    cases = list(cases)
    assert set(fast) <= {case.name for case in cases}, f"no such cases: {fast}"
    return [_parameter((case,), case.name in fast) for case in cases]


def crossed(*axes: Collection[Any], fast: int | None = None) -> list[Any]:
    """Every combination of the axes as parameters; all but a diagonal is wide.

    The diagonal passes once through the longest axis and cycles through the shorter ones:
    crossed("abc", (0, 1)) keeps a-0, b-1 and c-0. fast: keep only this many of the diagonal, if
    other tests cover the values that are left out.
    """
    lists = [list(axis) for axis in axes]
    length = max(len(v) for v in lists) if fast is None else fast
    kept = [tuple(n % len(values) for values in lists) for n in range(length)]
    places = product(*(range(len(values)) for values in lists))
    return [
        _parameter([values[i] for i, values in zip(place, lists, strict=True)], place in kept)
        for place in places
    ]


def _parameter(values: Iterable[Any], fast: bool) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.wide)
