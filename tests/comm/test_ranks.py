"""Tests of tests/support/ranks.py: results, failures, hangs, and the collectives of threads."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankDied, RankPool, RankTraceback, run_threads


def collectives(group, rank, base):
    R = dist.get_world_size(group)
    x = torch.full((2, 3), float(base + rank), dtype=torch.float64)
    each = [torch.full((2, 3), float(base + r), dtype=torch.float64) for r in range(R)]
    after, before = (rank + 1) % R, (rank - 1) % R

    gathered = x.new_empty(2 * R, 3)
    dist.all_gather_single(gathered, x, group=group, async_op=True).wait()
    assert torch.equal(gathered, torch.cat(each))

    total = x.clone()
    dist.all_reduce(total, group=group)
    assert torch.equal(total, sum(each))

    # Rank r sends r + 1 bytes to every rank.
    got = torch.empty(R * (R + 1) // 2, dtype=torch.uint8)
    sizes = [r + 1 for r in range(R)]
    mine = torch.full(((rank + 1) * R,), rank, dtype=torch.uint8)
    work = dist.all_to_all_single(got, mine, sizes, [rank + 1] * R, group=group, async_op=True)
    work.wait()
    assert got.tolist() == [r for r in range(R) for _ in range(r + 1)]

    if R > 1:
        got = torch.empty_like(x)
        arriving = dist.irecv(got, group=group, group_src=before)
        leaving = dist.isend(x, group=group, group_dst=after)
        arriving.wait(), leaving.wait()
        assert torch.equal(got, each[before])

        got = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x * 2, group=group, group_peer=before),
            dist.P2POp(dist.irecv, got, group=group, group_peer=after),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(got, 2 * each[after])

    message = [f"from {rank}"]
    shared = torch.tensor([base]) if rank == 0 else torch.tensor([0])
    dist.broadcast(shared, group=group, group_src=0)
    dist.barrier(group=group)
    return rank, total, int(shared), message


def check_collectives(results, world_size):
    assert [r[0] for r in results] == list(range(world_size))
    assert all(torch.equal(r[1], results[0][1]) for r in results)
    assert [r[2] for r in results] == [7] * world_size
    assert [r[3] for r in results] == [[f"from {r}"] for r in range(world_size)]


def gather_in_backward(group, rank):
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            out = dy.new_empty(dist.get_world_size(group) * dy.numel())
            dist.all_gather_single(out, dy.contiguous(), group=group)
            return dy * out.sum()

    x = torch.ones(2, requires_grad=True)
    Gathered.apply(x).backward(torch.full((2,), float(rank)))
    return x.grad


def fail_on(group, rank, failing, then_wait):
    if rank in failing:
        raise KeyError(f"rank {rank} says no")
    if then_wait:
        dist.barrier(group=group)
    return rank


def unpicklable_failure(group, rank):
    class LocalError(Exception):
        pass

    raise LocalError("cannot travel")


def hang(group, rank):
    if rank == 1:
        time.sleep(600)
    dist.barrier(group=group)


def deadlock(group, rank):
    if rank != 1:
        dist.all_reduce(torch.ones(1), group=group)


def die(group, rank):
    if rank == 2:
        os._exit(17)
    dist.barrier(group=group)


def warn(group, rank):
    warnings.warn("from a rank", UserWarning, stacklevel=1)


def process_id(group, rank):
    return os.getpid()


def random_number(group, rank):
    return torch.rand(3), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_have_every_collective(gloo_pool, world_size):
    results = gloo_pool.run(collectives, 7, world_size=world_size)
    check_collectives(results, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_threads_have_every_collective(world_size):
    check_collectives(run_threads(collectives, world_size, 7), world_size)


def test_collective_in_backward(gloo_pool):
    for results in (gloo_pool.run(gather_in_backward), run_threads(gather_in_backward, 4)):
        assert [r.tolist() for r in results] == [[rank * 12.0] * 2 for rank in range(4)]


def test_processes_live_on_between_calls(gloo_pool):
    before = gloo_pool.run(process_id)
    assert len(set(before)) == 4
    assert gloo_pool.run(process_id, world_size=2) == before[:2]
    assert os.getpid() not in before


def test_processes_start_each_call_from_one_seed_and_one_thread(gloo_pool):
    results = [*gloo_pool.run(random_number), *gloo_pool.run(random_number)]
    assert all(torch.equal(x, results[0][0]) for x, _ in results)
    assert {threads for _, threads in results} == {1}


def test_failure_on_every_rank_is_raised_and_keeps_the_processes(gloo_pool):
    before = gloo_pool.run(process_id)
    with pytest.raises(KeyError, match="says no") as caught:
        gloo_pool.run(fail_on, range(4), False)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "failed:\nTraceback" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)
    assert gloo_pool.run(process_id) == before


@pytest.fixture
def impatient(monkeypatch):
    """Shortens the time for which ranks wait for others that have failed."""
    monkeypatch.setattr("tests.support.ranks.GRACE_SECONDS", 2)


@pytest.mark.wide
def test_failure_that_leaves_others_waiting_replaces_the_processes(impatient):
    pool = RankPool(2)
    try:
        with pytest.raises(KeyError, match="rank 1 says no") as caught:
            pool.run(fail_on, [1], True)
        assert "rank 1 failed" in str(caught.value.__cause__)
        assert pool.run(fail_on, [], True) == [0, 1]
        with pytest.raises(RuntimeError, match=r"(?s)rank . failed:.*LocalError: cannot travel"):
            pool.run(unpicklable_failure)
    finally:
        pool.close()


@pytest.mark.wide
def test_hang_and_death_are_named_and_survived(impatient):
    pool = RankPool(3)
    try:
        with pytest.raises(TimeoutError, match=r"(?s)hang: no answer from ranks .*in hang"):
            pool.run(hang, timeout=5)
        with pytest.raises(RankDied, match="rank 2 died with exit code 17"):
            pool.run(die)
        assert pool.run(fail_on, [], True) == [0, 1, 2]
        workers = list(pool._workers)
    finally:
        pool.close()
    assert not any(worker.is_alive() for worker in workers)


def test_ranks_obey_this_process_warning_filters(gloo_pool):
    with pytest.raises(UserWarning, match="from a rank"):
        gloo_pool.run(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gloo_pool.run(warn)


def test_world_size_beyond_the_pool_is_refused(gloo_pool):
    with pytest.raises(ValueError, match=r"world_size must lie in \[1, 4\], got 5"):
        gloo_pool.run(process_id, world_size=5)


def test_unused_pool_starts_nothing():
    pool = RankPool(4)
    assert pool._workers == []
    pool.close()


@pytest.mark.parametrize("waits", [False, True])
def test_thread_failure_names_its_rank_and_leaves_the_next_run_whole(waits, impatient):
    with pytest.raises(KeyError, match="rank 2 says no") as caught:
        run_threads(fail_on, 4, [2], waits)
    assert caught.value.__notes__ == ["raised on rank 2 of 4 (threads)"]
    assert run_threads(fail_on, 4, [], True) == [0, 1, 2, 3]


@pytest.mark.wide
def test_thread_deadlock_times_out():
    with pytest.raises(TimeoutError, match=r"(?s)deadlock: ranks \[0, 2\] still run.*all_reduce"):
        run_threads(deadlock, 3, timeout=5)
    assert run_threads(fail_on, 3, [], True) == [0, 1, 2]


def test_threads_leave_no_process_group_behind():
    run_threads(fail_on, 2, [], True)
    assert not dist.is_initialized()
