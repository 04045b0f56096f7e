"""Sweeps over many cases: which of them `make test` runs, and which only `make test-rest` runs.

In a sweep all but a few cases have the marker `wide`. The others contain every value of every axis
at least once, so that `make test` finds what a single value breaks. With those of `make test-rest`
they contain every pair of values, so that it finds what a combination of two values breaks. Faults
that need three are rare. FLA_CP_EVERY_COMBINATION=1 in the environment runs all combinations, which
are nearly twice as many wide tests.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

EVERY = "FLA_CP_EVERY_COMBINATION"
"""If this variable is set to anything but 0 or nothing, sweeps contain every combination."""


def some(cases: Iterable[Any], fast: Collection[str]) -> list[Any]:
    """The cases as parameters; all but those named in `fast` are wide. Cases have a `name`."""
    cases = list(cases)
    assert set(fast) <= {case.name for case in cases}, f"no such cases: {fast}"
    return [_parameter((case,), case.name in fast) for case in cases]


def crossed(*axes: Collection[Any], fast: int | None = None) -> list[Any]:
    """Combinations of the axes' values as parameters; all but a diagonal is wide.

    The diagonal passes once through the longest axis and cycles through the shorter ones:
    crossed("abc", (0, 1)) keeps a-0, b-1 and c-0. Of the others there are as many as it takes for
    every value of an axis to meet every value of each other axis. So two axes have all
    combinations, more axes have a part of them.

    fast: keep only this many of the diagonal, if other tests cover the values that are left out.
    """
    lists = [list(axis) for axis in axes]
    sizes = [len(values) for values in lists]
    length = max(sizes) if fast is None else fast
    kept = [tuple(n % size for size in sizes) for n in range(length)]
    if os.environ.get(EVERY, "0") not in ("", "0"):
        chosen = set(product(*map(range, sizes)))
    else:
        chosen = {*kept, *pairwise_cover(sizes, kept)}
    return [
        _parameter([values[i] for i, values in zip(place, lists, strict=True)], place in kept)
        for place in sorted(chosen)
    ]


Place = tuple[int, ...]
"""A combination: the number of the value of each axis."""


def pairwise_cover(sizes: Collection[int], given: Iterable[Place] = ()) -> list[Place]:
    """Combinations that, with those given, contain each pair of values of two axes at least once.

    sizes: the number of values of each axis. Each combination starts from a pair that is missing,
    and takes of each other axis the value that makes most missing pairs; among equals, the one that
    has been used least.
    """
    axes = range(len(sizes))
    spans = [range(size) for size in sizes]
    missing = {
        (a, i, b, j) for a, b in combinations(axes, 2) for i, j in product(spans[a], spans[b])
    }
    used: Counter[tuple[int, int]] = Counter()
    found: list[Place] = []

    def pairs(values: dict[int, int]) -> set[tuple[int, int, int, int]]:
        return {(a, values[a], b, values[b]) for a, b in combinations(sorted(values), 2)}

    def count(place: Place) -> None:
        values = dict(enumerate(place))
        missing.difference_update(pairs(values))
        used.update(values.items())

    for place in given:
        count(place)
    while missing:
        a, i, b, j = min(missing)
        values = {a: i, b: j}
        for axis in (axis for axis in axes if axis not in values):
            news = [len(pairs(values | {axis: value}) & missing) for value in spans[axis]]
            order = [(-new, used[axis, value]) for value, new in enumerate(news)]
            values[axis] = order.index(min(order))
        found.append(tuple(values[axis] for axis in axes))
        count(found[-1])
    return found


def _parameter(values: Iterable[Any], fast: bool) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.wide)
