"""Background checkpoints hold the state of their step; disk errors are printed and not fatal."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager

import fla_cp.train.saver
from fla_cp.train import checkpoint
from fla_cp.train.checkpoint import Progress
from fla_cp.train.saver import SaveFailed, Saver, stagers_can_be_used_again
from tests.support.checkpoints import OneRank, disk_of, names, ranks_without_mesh


def test_training_goes_on_while_the_state_of_the_step_is_written(tmp_path, ranks, monkeypatch):
    one, other, lines, gate = OneRank(ranks), OneRank(ranks, seed=1), [], threading.Event()
    original, expected = os.fsync, {}

    def held(handle):  # the disk is as slow as the test wants
        assert gate.wait(60)
        original(handle)

    monkeypatch.setattr(os, "fsync", held)
    with contextlib.closing(one.saver(tmp_path, lines.append)) as saver:
        for step in (4, 5):  # the second time, the buffers are reused
            one.update()
            expected[step] = one.tensors(), torch.get_rng_state()
            saver.start(one.model, one.optimizer, Progress(step))
            one.update()
            torch.rand(3)
            saver.poll()
            assert len(lines) == step - 4 == len(checkpoint.checkpoints(tmp_path))
            gate.set()
            if step == 4:
                saver.wait()
                gate.clear()
        saver.start(one.model, one.optimizer, Progress(6))  # after the checkpoint before
        assert {"step-00000004", "step-00000005"} <= set(names(tmp_path))
    # close waits for it, too
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert saver.step == 6
    lines = [line for line in lines if "waited" not in line]  # printed if the disk is slow
    assert [line.split(":")[0] for line in lines] == [f"checkpoint step {n}" for n in (4, 5, 6)]
    assert "paused the step for 0." in lines[0] and "s, written in " in lines[0]
    assert other.load(tmp_path / "checkpoints" / "step-00000005") == Progress(5)
    tensors, drawn = expected[5]
    torch.testing.assert_close(other.tensors(), tensors, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_full_disk_costs_a_line_and_the_last_one_an_error(tmp_path, ranks):
    one, lines = OneRank(ranks), []
    one.update()
    good = one.save(tmp_path, 1)
    partial = tmp_path / "checkpoints" / ".partial-step-00000002"
    with contextlib.closing(one.saver(tmp_path, lines.append)) as saver:
        saver.step = 1
        with disk_of(100_000):
            saver.start(one.model, one.optimizer, Progress(2))
            saver.wait()
            (line,) = lines
            assert line.startswith("warning: the checkpoint of step 2 could not be written: ")
            assert line.endswith("; the last whole one is of step 1")
            for part in ("File too large", "bytes to write", "bytes free", f"'{partial}/__0_0"):
                assert part in line
            assert "\n" not in line
            assert names(tmp_path) == [good.name] and saver.step == 1
            with pytest.raises(SaveFailed, match=r"^the checkpoint of step 3 .*File too large.*$"):
                saver.write(one.model, one.optimizer, Progress(3))
            assert names(tmp_path) == [good.name]
        saver.start(one.model, one.optimizer, Progress(4))
        saver.wait()
        assert saver.step == 4 and names(tmp_path) == [good.name, "step-00000004"]


@pytest.mark.parametrize("what", ["record", "folder"])
def test_other_faults_of_the_disk(what, tmp_path, ranks, monkeypatch):
    one, lines = OneRank(ranks), []
    if what == "record":  # the last file, which only rank 0 writes
        monkeypatch.setattr("fla_cp.train.saver.seal", lambda record: bytes(500_000))
    else:
        (tmp_path / "checkpoints").write_text("a file")
    with contextlib.closing(one.saver(tmp_path, lines.append)) as saver, disk_of(450_000):
        saver.start(one.model, one.optimizer, Progress(2))
        saver.wait()
        (line,) = lines
        assert "could not be written: [Errno" in line and "there is none yet" in line
        with pytest.raises(SaveFailed):
            saver.write(one.model, one.optimizer, Progress(3))
    assert checkpoint.find("auto", tmp_path) == []


def test_files_that_only_another_host_has_fail_the_save(tmp_path, ranks, monkeypatch):
    one, lines = OneRank(ranks), []
    original = checkpoint.remove
    real = os.fsync

    def vanish(handle):  # as if a rank had written into a folder of its own host
        real(handle)
        for shard in Path(tmp_path).glob("checkpoints/*/*.distcp"):
            original(shard)

    monkeypatch.setattr(os, "fsync", vanish)
    with contextlib.closing(one.saver(tmp_path, lines.append)) as saver:
        saver.start(one.model, one.optimizer, Progress(2))
        saver.wait()
    assert "--out must be on a file system that all hosts share" in lines[0]
    assert names(tmp_path) == []


def _one_rank_has_no_space(group, rank, run):
    ranks = ranks_without_mesh(group, rank)
    torch.manual_seed(rank)
    model, lines, errors = nn.Linear(3, 3), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    facts = {"model": {}, "data": {}}
    saver = Saver(run, facts, 9, ranks, lines.append)
    with contextlib.closing(saver):
        with disk_of(1000) if rank == 2 else contextlib.nullcontext():
            saver.start(model, optimizer, Progress(1))
            saver.wait()
            dist.barrier(group)
            left = os.listdir(run / "checkpoints")
            dist.barrier(group)
            try:
                saver.write(model, optimizer, Progress(2))
            except SaveFailed as error:
                errors.append(str(error))
        saver.start(model, optimizer, Progress(3))
        saver.wait()
        path = saver.write(model, optimizer, Progress(4))
    found = checkpoint.find("auto", run)
    taken = checkpoint.newest_whole(found, "auto", False, ranks, lines.append)[0]
    dist.barrier(group)
    if rank == 0:
        shard = path / "__3_0.distcp"
        shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    dist.barrier(group)
    again = checkpoint.newest_whole(found, "auto", False, ranks, lines.append)[0]
    return left, lines, errors, taken, again


def test_ranks_agree_where_the_disk_of_one_is_full(gloo_pool, tmp_path):
    results = gloo_pool.run(_one_rank_has_no_space, tmp_path, timeout=200)
    three, four = (tmp_path / "checkpoints" / f"step-0000000{i}" for i in (3, 4))
    for left, lines, errors, taken, again in results:
        assert left == []
        failed, written, damaged = lines
        assert "of step 1 could not be written: [Errno 27] File too large (" in failed
        assert "__2_0.distcp' (rank 2); there is none yet" in failed
        assert written.startswith("checkpoint step 3: ")
        assert len(errors) == 1 and "of step 2 could not be written" in errors[0]
        assert taken == four
        assert again == three
        assert "__3_0.distcp differs from its checksum" in damaged
    assert len({lines[2] for _, lines, *_ in results}) == 1


def test_stagers_that_copy_once(tmp_path, ranks, monkeypatch):
    """torch 2.11 has such stagers."""

    class Once(DefaultStager):
        def stage(self, *args, **kwargs):
            try:
                return super().stage(*args, **kwargs)
            finally:
                self.close()

    monkeypatch.setattr(fla_cp.train.saver, "DefaultStager", Once)
    stagers_can_be_used_again.cache_clear()
    assert not stagers_can_be_used_again()
    model, lines = nn.Linear(3, 3), []
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(tmp_path, {"model": {}, "data": {}}, 9, ranks, lines.append)
    try:
        with contextlib.closing(saver):
            for step in (1, 2, 3):
                saver.start(model, optimizer, Progress(step))
                saver.wait()
    finally:
        stagers_can_be_used_again.cache_clear()
    assert [line.split(":")[0] for line in lines] == [f"checkpoint step {n}" for n in (1, 2, 3)]


def test_saver_leaves_no_group_behind(tmp_path, ranks):
    groups = len(dist.distributed_c10d._world.pg_map)
    saver = Saver(tmp_path, {}, 1, ranks, lambda line: None)
    assert len(dist.distributed_c10d._world.pg_map) == groups + 1
    saver.close()
    saver.close()
    assert len(dist.distributed_c10d._world.pg_map) == groups
