"""Fixtures of the tests of training."""

import pytest

from fla_cp.train.distributed import joined
from fla_cp.train.parse import parse


@pytest.fixture(scope="module")
def ranks():
    """The ranks of a world of one, on the CPU."""
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks
