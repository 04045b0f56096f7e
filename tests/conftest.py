"""Fixtures shared by all tests; see ranks.py for the two kinds of ranks."""

import pytest

from tests.ranks import GlooPool


@pytest.fixture(scope="session")
def gloo_pool():
    """Four gloo processes, started by the first test that calls `run`."""
    pool = GlooPool(4)
    yield pool
    pool.close()
