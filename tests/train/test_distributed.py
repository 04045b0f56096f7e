"""Decisions of rank 0, and problems of any rank, as all ranks learn them."""

import os

import pytest

from fla_cp.train.config import UserError
from fla_cp.train.saver import SaveFailed
from tests.support.checkpoints import ranks_without_mesh


def _decide(group, rank):
    ranks = ranks_without_mesh(group, rank)
    found = ranks.decide(lambda: (rank, os.getpid()))

    def refuse():
        raise SaveFailed(f"rank {rank} has no disk")

    with pytest.raises(UserError) as error:
        ranks.decide(refuse)
    problems = ranks.first_problem(f"rank {rank} is at fault" * (rank > 1)), ranks.first_problem("")
    return found, type(error.value), str(error.value), problems


def test_rank_0_decides_for_all(gloo_pool):
    results = gloo_pool.run(_decide)
    (rank, _), *rest = results[0]
    assert rank == 0
    assert rest == [SaveFailed, "rank 0 has no disk", ("rank 2 is at fault", "")]
    assert all(result == results[0] for result in results)
