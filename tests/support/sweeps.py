"""Sweeps over many cases: which of them `make test` runs, and which are left to `make test-rest`.

A sweep has the marker `wide` on all but a few of its cases. What stays has every value of every
axis at least once, so that what a value alone breaks is found at once; what only a combination
breaks is found by the rest.
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
    """Every combination as parameters; all but a diagonal is wide.

    The diagonal goes through the longest axis once, and through the shorter ones again and again:
    crossed("abc", (0, 1)) keeps a-0, b-1 and c-0. fast: keep so many of it, from its start, where
    the rest differ from them by a value that other tests have.
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
