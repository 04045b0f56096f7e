"""tests/support/sweeps.py: which combinations a sweep has, and which of them are wide."""

from itertools import combinations, product

import pytest

from tests.support.sweeps import EVERY, crossed, pairwise_cover

SIZES = [(3,), (4, 3), (16, 4, 3), (2, 2, 2, 2), (16, 2, 4, 2), (3, 3, 2, 2), (9, 6, 2)]


def split(sweep):
    """The combinations that `make test` runs, and those that it leaves out."""
    fast = [p.values for p in sweep if not p.marks]
    return fast, [p.values for p in sweep if p.marks]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_pair_of_values_comes_once_at_least(sizes):
    axes = [range(size) for size in sizes]
    fast, wide = split(crossed(*axes))
    found = {*fast, *wide}
    assert len(found) == len(fast) + len(wide)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(p[a], p[b]) for p in found} == {*product(axes[a], axes[b])}
    for axis, values in enumerate(axes):
        assert {p[axis] for p in fast} == {*values}


def test_the_cover_is_small():
    assert len(pairwise_cover((16, 4, 3))) == 16 * 4
    assert len(pairwise_cover((2, 2, 2, 2))) <= 6
    assert len(pairwise_cover((16, 2, 4, 2))) <= 16 * 4 + 4
    assert len(crossed("abc", range(4))) == 12


def test_given_combinations_are_not_covered_again():
    given = [(n % 3, n % 2, n % 2) for n in range(6)]
    more = pairwise_cover((3, 2, 2), given)
    assert not {*given} & {*more}
    assert pairwise_cover((3, 2, 2), [*given, *more]) == []


def test_the_diagonal_may_be_cut():
    fast, wide = split(crossed("abcd", (0, 1), fast=2))
    assert fast == [("a", 0), ("b", 1)]
    assert len(wide) == 6


@pytest.mark.parametrize("value, every", [("1", True), ("0", False), ("", False)])
def test_every_combination_if_asked(monkeypatch, value, every):
    monkeypatch.setenv(EVERY, value)
    assert (len(crossed("abcd", "abcd", "abcd")) == 64) == every
