"""Mixtures: how `--data` names them, the shares of their packs, and steps at any position."""

from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch

from fla_cp.train.data import ArraySource, PackedDataset
from fla_cp.train.memmap import write_memmap
from fla_cp.train.mixture import MixedPacks, parse_mixture, round_counts
from fla_cp.train.sources import build_dataset

T = 8


def source(token, packs):
    """A data set whose pack i begins with i and else has one token."""
    values = np.full((packs, T), token, dtype=np.uint16)
    values[:, 0] = np.arange(packs)
    return PackedDataset(ArraySource(values.ravel(), np.array([0, packs * T]), 300), T)


def mixed(weights=("0.7", "0.2", "0.1"), packs=(30, 5, 4)):
    parts = [source(100 + i, count) for i, count in enumerate(packs)]
    return MixedPacks(parts, [Fraction(w) for w in weights], ["A", "B", "C"][: len(packs)])


def origin(pack):
    return int(pack["tokens"][1]) - 100


@pytest.mark.parametrize(
    "spec, parts",
    [
        ("stdlib", {"stdlib": 1}),
        ("text:/a,b:0.5", {"text:/a,b:0.5": 1}),  # one source has no weight
        ("text:A:0.7,hf:B:0.3", {"text:A": "0.7", "hf:B": "0.3"}),
        ("stdlib:1,synthetic:3", {"stdlib": 1, "synthetic": 3}),
        ("text:/a:b,c:2,memmap:/x.bin:.5", {"text:/a:b,c": 2, "memmap:/x.bin": "0.5"}),
        ("text:a:1,texture,hf:b:1.", {"text:a:1,texture": None, "hf:b": 1}),
        ("text:stdlibs,stdliberal:1,hf:b:2", {"text:stdlibs,stdliberal": 1, "hf:b": 2}),
    ],
)
def test_grammar(spec, parts):
    if None in parts.values():
        with pytest.raises(ValueError, match=r"must end in :WEIGHT, .* got 'text:a:1,texture'"):
            parse_mixture(spec)
    else:
        assert dict(parse_mixture(spec)) == {k: Fraction(v) for k, v in parts.items()}


@pytest.mark.parametrize(
    "spec, message",
    [
        ("text:a,hf:b:1", "must end in :WEIGHT, a positive decimal, .* got 'text:a'"),
        ("text:a:0,hf:b:1", "got 'text:a:0'"),
        ("text:a:-1,hf:b:1", "got 'text:a:-1'"),
        ("text:a:1e3,hf:b:1", "got 'text:a:1e3'"),
        ("stdlib,synthetic:1", "got 'stdlib'"),
        (
            "stdlib:0.12345,synthetic:0.87655",
            "at most 10000 packs, got 20000 for 2469:17531; round",
        ),
    ],
)
def test_unclear_mixtures_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        build_dataset(spec, T, "train", 0)


def test_every_round_has_the_shares_and_every_source_its_own_order():
    assert round_counts([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]) == [7, 2, 1]
    assert round_counts([Fraction(2), Fraction(4)]) == [1, 2]
    data = mixed()
    order = data.sampler(10, seed=5)
    packs = [[data[i] for i in step] for step in islice(order, 12)]
    assert all(Counter(map(origin, step)) == {0: 7, 1: 2, 2: 1} for step in packs)
    assert len({tuple(map(origin, step)) for step in packs}) > 6
    for k, part in enumerate(data.parts):
        own = [p for step in packs for p in step if origin(p) == k]
        alone = part.sampler(1, seed=5).packs(0, len(own))
        assert [int(p["tokens"][0]) for p in own] == alone


@pytest.mark.parametrize("batch", [1, 3, 10, 64])
def test_any_step_is_computed_alone(batch):
    whole = list(islice(mixed().sampler(batch, seed=2), 40))
    for start in (0, 1, 7, 39):
        assert next(iter(mixed().sampler(batch, 2, start))) == whole[start]
    assert whole != list(islice(mixed().sampler(batch, seed=3), 40))
    assert all(len(step) == batch for step in whole)
    behind = mixed().sampler(1, seed=2).packs(25, 25 + batch)
    assert next(iter(mixed().sampler(batch, 2, 7, first_pack=25))) == behind


def test_an_evaluation_reads_every_source():
    head = mixed().head(20)
    assert Counter(origin(head[i]) for i in range(len(head))) == {0: 14, 1: 4, 2: 2}
    few = mixed().head(2)
    assert Counter(origin(few[i]) for i in range(len(few))) == {0: 1, 1: 1, 2: 1}
    assert len(mixed().head(1000)) == 39  # no more than there are
    rare = mixed(weights=("0.96", "0.02", "0.02")).head(8)
    assert Counter(origin(rare[i]) for i in range(len(rare))) == {0: 6, 1: 1, 2: 1}


def test_sources_need_one_vocabulary(tmp_path):
    write_memmap(tmp_path / "a", [np.arange(2000) % 64], 64)
    spec = f"memmap:{tmp_path}/a:1,synthetic:1"
    data = build_dataset(spec, T, "train", 0)
    assert data.vocab_size == 64 and " + " in data.extent
    assert data[0]["tokens"].shape == data[1]["tokens"].shape == (T,)
    assert not torch.equal(data[2]["tokens"], data[3]["tokens"])
    with pytest.raises(
        ValueError, match="one vocabulary, got 64 tokens for 'synthetic', 256 for 's"
    ):
        build_dataset("synthetic:1,stdlib:1", T, "train", 0)
