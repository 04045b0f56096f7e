"""Fixtures shared by all tests; see ranks.py for the two kinds of ranks."""

import contextlib

import pytest

with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
    # Triton reads it on import, which torch.compile does too: set here for all tests
    patch.setenv("TRITON_INTERPRET", "1")
    import fla_cp.kernels.triton.backend
    import fla_cp.kernels.triton.clock  # noqa: F401
    from tests.support.interpreter import hasten

    hasten()

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def gloo_pool():
    """Four gloo processes, started by the first test that calls `run`."""
    pool = RankPool(4)
    yield pool
    pool.close()
