"""Batches that other processes read ahead: their order, a resume, and how the processes end."""

import os
import pickle
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from fla_cp.train import step
from fla_cp.train.data import ArraySource, PackedDataset, StepBatchSampler, batch_hash, collate
from fla_cp.train.loader import Sharing, StepLoader, token_ranges
from fla_cp.train.parse import parse
from fla_cp.train.sources import build_dataset
from fla_cp.train.step import Feed, agree
from tests.support.processes import alive, children, environment, wait_for

T = 50


def dataset(tokens=2000, seq_len=T):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 200, tokens).astype(np.uint16)
    offsets = np.array([0, 3, 77, 78, 500, 1234, tokens])
    return PackedDataset(ArraySource(values, offsets, vocab_size=256), seq_len)


def steps_of(data, workers, start=0, count=6, dp_rank=0, **options):
    sampler = StepBatchSampler(len(data), 8, seed=3, start_step=start)
    sharing = Sharing(2, cp=2, cp_rank=1, layout=options.pop("layout", "contiguous"))
    with StepLoader(
        data, sampler, sharing, dp=2, dp_rank=dp_rank, workers=workers, **options
    ) as loader:
        return list(islice(loader, count))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        for share, other in zip(each, wanted, strict=True):
            torch.testing.assert_close(share[:3], other[:3], rtol=0, atol=0)
            assert share[3:] == other[3:]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "uneven"])
def test_shares_of_all_ranks_are_the_batch(layout):
    data = dataset()
    packs = [data[i] for i in (5, 2, 9)]
    batch = collate(packs)
    for cp in (1, 2, 4):
        shares = [Sharing(3, cp, rank, layout)(packs)[0] for rank in range(cp)]
        tokens, labels = torch.full((2, 1, 3 * T), -1).unbind()
        for share, ranges in zip(shares, token_ranges(3 * T, cp, layout), strict=True):
            for x, mine in ((tokens, share.tokens), (labels, share.labels)):
                x[:, [i for lo, hi in ranges for i in range(lo, hi)]] = mine
            assert share.cu_seqlens.tolist() == batch["cu_seqlens"].tolist()
            assert (share.total, share.digest) == (3 * T, batch_hash(batch))
            assert share.targets == int((batch["labels"] != -100).sum())
        assert torch.equal(tokens, batch["tokens"]) and torch.equal(labels, batch["labels"])


def test_uneven_ranges_grow_by_the_first_with_each_rank():
    found = token_ranges(1000, 4, "uneven")
    assert found == [[(0, 100)], [(100, 300)], [(300, 600)], [(600, 1000)]]


def test_data_parallel_ranks_divide_each_step_in_order():
    data = dataset()
    sampler = StepBatchSampler(len(data), 8, seed=3)
    wanted = [sampler.batch(n) for n in range(4)]
    parts = [steps_of(data, 0, count=4, dp_rank=rank) for rank in range(2)]
    for n, indices in enumerate(wanted):
        for rank in range(2):
            own = indices[4 * rank : 4 * rank + 4]
            hashes = [batch_hash(collate([data[i] for i in own[j : j + 2]])) for j in (0, 2)]
            assert [share.digest for share in parts[rank][n]] == hashes


def test_workers_change_nothing(tmp_path):
    """Not the order, not after a resume, and not the state of torch's generators."""
    data = dataset()
    before = torch.get_rng_state()
    alone = steps_of(data, 0)
    assert_same(steps_of(data, 2), alone)
    assert_same(steps_of(data, 2, start=4, count=2), alone[4:])
    assert_same(steps_of(data, 0, start=4, count=2), alone[4:])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_source_reaches_a_worker_as_shared_memory():
    source = dataset(tokens=100_000).source
    tokens, offsets = source.tokens.copy(), source.offsets.copy()
    with_workers = PackedDataset(source, 100)
    whole = [pack["tokens"] for pack in with_workers]
    # pickled outside of a spawn, shared tensors are copied: compare the values
    copy = pickle.loads(pickle.dumps(source))
    for one in (source, copy):
        assert one.tokens.dtype == np.uint16 and one.offsets.dtype == offsets.dtype
        assert np.array_equal(one.tokens, tokens) and np.array_equal(one.offsets, offsets)
        assert one.vocab_size == 256
    assert all(tensor.is_shared() for tensor, _ in source._shared)
    assert torch.equal(torch.stack(whole), torch.stack([p["tokens"] for p in with_workers]))


def test_shared_memory_that_is_too_small_is_named(monkeypatch):
    def full(self):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(RuntimeError, match=r"--data.workers: 4000 bytes of tokens must fit into"):
        steps_of(dataset(), 1)


def test_memmap_and_text_are_read_by_workers(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    data = build_dataset(f"text:{tmp_path}", T, "train", 0)
    assert_same(steps_of(data, 1, count=2), steps_of(data, 0, count=2))


def test_a_dead_worker_is_an_error_that_says_what_helps():
    data, before = dataset(), set(children(os.getpid()))
    sampler = StepBatchSampler(len(data), 4, seed=0)
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match=r"reads data has died: pid \d+, exit code -9 .*--data"),
        StepLoader(data, sampler, Sharing(1, 1, 0, "contiguous"), workers=1) as loader,
    ):
        next(loader)
        (worker,) = set(children(os.getpid())) - before - {tracker()}
        os.kill(worker, signal.SIGKILL)
        for _ in range(10_000):
            next(loader)


def tracker():
    from multiprocessing.resource_tracker import _resource_tracker

    return _resource_tracker._pid


class Broken(PackedDataset):
    """A data set of which a pack cannot be read."""

    def __getitem__(self, index):
        raise OSError(f"pack {index} is on a broken disk")


def test_the_error_of_a_worker_is_raised_with_its_text():
    data = dataset()
    broken = Broken(data.source, T)
    loader = StepLoader(
        broken, StepBatchSampler(4, 1, 0), Sharing(1, 1, 0, "contiguous"), workers=1
    )
    with pytest.raises(OSError, match=r"pack \d is on a broken disk"), loader:
        next(loader)


SCRIPT = """
import os, sys, time
from fla_cp.train.data import StepBatchSampler
from fla_cp.train.loader import Sharing, StepLoader
from fla_cp.train.sources import build_dataset

if __name__ == "__main__":
    data = build_dataset("synthetic", 50, "train", 0)
    steps = StepBatchSampler(len(data), 2, 0)
    loader = StepLoader(data, steps, Sharing(1, 1, 0, "contiguous"), workers=2)
    next(loader)
    print("reading", flush=True)
    for line in sys.stdin:
        print(sum(share.total for share in next(loader)), flush=True)
"""


def test_workers_leave_signals_to_their_rank_and_end_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "reading\n"
        workers = [
            pid
            for pid in children(process.pid)
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        for _ in range(8):  # more than are read ahead
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "100\n"
        assert all(alive(pid) for pid in workers)
        process.kill()
        wait_for("the workers' end", lambda: not any(alive(pid) for pid in workers), timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_feed_reads_ahead_in_order(ranks):
    config = parse(
        ["--device", "cpu", "--seq-len", "50", "--global-batch-size", "4"]
        + ["--micro-batch-size", "2"]
    )
    data = dataset()
    with Feed(config, data, ranks, 2) as plain, Feed(config, data, ranks, 2) as ahead:
        for count in range(5):
            one, other = plain.take(), ahead.take()
            assert [batch.ahead is None for batch in one] == [True, True]
            assert [batch.ahead is None for batch in other] == [count == 0] * 2
            assert_same([[b.share for b in other]], [[b.share for b in one]])
            for a, b in zip(one, other, strict=True):
                tokens, labels, context = a.placed(config, ranks)
                placed = b.placed(config, ranks)
                assert torch.equal(placed[0], tokens) and torch.equal(placed[1], labels)
                assert placed[2].global_cu_seqlens == context.global_cu_seqlens
            assert not ahead.read_ahead()


@pytest.mark.parametrize("device, workers", [("cuda", 2), ("cpu", 0)])
def test_batches_for_a_gpu_are_pinned_and_copied_ahead(ranks, monkeypatch, device, workers):
    """By workers, and on a stream of their own. Objects that do nothing stand in for the GPU."""
    made, streams, placed = [], [], []

    def loading(*given, **options):
        made.append((options["num_workers"], options["pin_memory"]))
        options |= {"num_workers": 0, "pin_memory": False, "multiprocessing_context": None}
        return DataLoader(*given, **options | {"worker_init_fn": None})

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr("fla_cp.train.loader.DataLoader", loading)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream of its own")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(step, "place", lambda *given: placed.append([*streams]))
    config = parse(["--device", "cpu", "--seq-len", "50", "--global-batch-size", "4"])
    there = replace(ranks, device=torch.device(device))
    with Feed(config, dataset(), there, 0) as feed:
        feed.read_ahead()
    gpu = device == "cuda"
    assert made == [(workers, gpu)]
    assert placed == [["a stream of its own" if gpu else None]]


class Copies(TorchFunctionMode):
    """Notes of each copy to a device whether the host may go on meanwhile."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.found.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_copies(ranks):
    config = parse(["--device", "cpu", "--seq-len", "50", "--global-batch-size", "4"])
    data = dataset()
    (share,) = Sharing(2, 1, 0, "contiguous")([data[0], data[1]])
    with Copies() as copies:
        step.place(share, config, ranks)
    assert len(copies.found) >= 3 and all(copies.found)


def test_the_next_batch_is_agreed_on_ahead(ranks, monkeypatch):
    asked = []
    ask = lambda *given: asked.append(given[2]) or agree(*given)  # noqa: E731
    monkeypatch.setattr(step, "agree", ask)
    config = parse(["--device", "cpu", "--seq-len", "50", "--global-batch-size", "4"])
    with Feed(config, dataset(), ranks, 0) as feed:
        first = feed.take()
        assert feed.agreement(first, stop=False) == agree(first, ranks)
        assert feed.read_ahead(stop=True) and asked == [False, True]
        second = feed.take()
        assert feed.agreement(second) == agree(second, ranks, stop=True) and len(asked) == 2
        assert not feed.agreement(second).stop and len(asked) == 3


ABANDONED = """
from fla_cp.train.data import StepBatchSampler
from fla_cp.train.loader import Sharing, StepLoader
from fla_cp.train.sources import build_dataset

if __name__ == "__main__":
    data = build_dataset("synthetic", 50, "train", 0)
    steps = StepBatchSampler(len(data), 2, 0)
    loader = StepLoader(data, steps, Sharing(1, 1, 0, "contiguous"), workers=1)
    next(loader)
    raise SystemExit(7)
"""


def test_a_rank_that_fails_does_not_wait_for_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ABANDONED.replace("raise", "import builtins; builtins.kept = loader; raise"))
    done = subprocess.run([sys.executable, str(script)], env=environment(), timeout=240)
    assert done.returncode == 7
