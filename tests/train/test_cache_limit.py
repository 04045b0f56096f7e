"""Shards are deleted from the one that was used longest ago, until the folder has its size."""

import os

import pytest

from fla_cp.train.cache_limit import mark_used, prune
from fla_cp.train.config import UserError
from fla_cp.train.parse import parse


@pytest.fixture
def shards(tmp_path):
    """Six shards of 10 bytes of two data sets, in the order in which they were used."""
    found = []
    for n in range(6):
        path = tmp_path / ("ab"[n % 2] * 8) / f"{n:06d}"
        path.mkdir(parents=True)
        (path / "tokens.bin").write_bytes(bytes(7))
        (path / "tokens.json").write_bytes(bytes(3))
        (path.parent / f"{n:06d}.lock").write_bytes(bytes(1000))
        os.utime(path, (n, n))
        found.append(path)
    return found


def left(shards):
    return [n for n, path in enumerate(shards) if path.exists()]


def test_the_least_recently_used_go_first(tmp_path, shards):
    assert prune(tmp_path, 60, shards[5]) == 0
    assert prune(tmp_path, 45, shards[5]) == 2 and left(shards) == [2, 3, 4, 5]
    mark_used(shards[2])
    assert prune(tmp_path, 20, shards[5]) == 2 and left(shards) == [2, 5]
    assert not list(tmp_path.glob("*/.*"))


def test_what_was_just_made_stays(tmp_path, shards):
    assert prune(tmp_path, 1, shards[0]) == 5 and left(shards) == [0]


def test_a_shard_that_cannot_be_deleted_is_left(tmp_path, shards, monkeypatch):
    def refused(path, target):
        raise PermissionError

    monkeypatch.setattr(type(shards[0]), "rename", refused)
    assert prune(tmp_path, 0, shards[0]) == 0 and left(shards) == list(range(6))


def test_the_flag():
    assert parse(["--data.cache-gib", "0.5"]).data.cache_gib == 0.5
    with pytest.raises(UserError, match=r"--data.cache-gib must be positive, got 0.0"):
        parse(["--data.cache-gib", "0"])
