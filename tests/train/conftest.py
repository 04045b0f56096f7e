"""Fixtures of the tests of training."""

import random

import pytest

from fla_cp.train.distributed import joined
from fla_cp.train.parse import parse


@pytest.fixture(scope="module")
def ranks():
    """The ranks of a world of one, on the CPU."""
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def short_texts(tmp_path_factory):
    """--data with documents of 5 to 60 bytes, so that some cross the end of every rank."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(240):
        (folder / f"{i}.txt").write_text("".join(rng.choices("abcdefgh ", k=rng.randint(5, 60))))
    return f"text:{folder}"
