"""Fixtures of the tests of training."""

import pytest

from fla_cp.train.config import parse
from fla_cp.train.distributed import joined


@pytest.fixture(scope="module")
def ranks():
    """The ranks of a world of one, on the CPU."""
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks
