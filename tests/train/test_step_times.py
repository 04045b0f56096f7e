"""Where the time of a step goes: waits for other ranks, the slowest rank, the host and the GPU."""

import re
import time
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fla_cp.comm import measure_exchange, timing
from fla_cp.comm.timing import exchange_begins, exchange_wait
from fla_cp.train import main
from fla_cp.train.metrics import Metrics, _brief
from fla_cp.train.model import compile_blocks
from fla_cp.train.parse import parse
from fla_cp.train.step_times import RankTimes, slowest
from tests.support.loops import training_loop
from tests.support.meshes import ranks_of

FLAGS = (
    "--device cpu --data synthetic --seq-len 512 --eval-every 0 --max-steps 9 --tracker none "
    "--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 "
)
DELAY_S = 0.4
SPLITS = ["--cp 2 --dp-shard 2", "--dp-shard 4 --global-batch-size 4"]
CPU = torch.device("cpu")


def times(waiting):
    return RankTimes(1.0, 2.0, waiting, 3.0, 4.0, 5.0)


def test_the_slowest_rank_waits_least():
    assert slowest([times(30.0), times(10.0), times(40.0)]) == (1, 25.0)
    assert slowest([times(7.0), times(7.0)]) == (0, 0.0)


def test_an_exchange_is_under_way_from_when_its_messages_left(monkeypatch):
    # Ranks that are threads of this process share the timer, and may leave it behind.
    monkeypatch.setattr(timing, "_timer", None)
    assert exchange_begins(CPU) is None
    with measure_exchange() as timer:
        began = exchange_begins(CPU)
        time.sleep(0.05)
        with exchange_wait(CPU, began=began):
            time.sleep(0.02)
    assert 20 <= timer.elapsed_ms() < timer.under_way_ms() - 45


def late_to(what, monkeypatch, feed, ranks):
    """Makes this rank late with its data ("data") or with the sums ("sums"). Ranks are threads of
    one process, which share its modules."""
    if what == "data":
        read = feed._read
        feed._read = lambda: time.sleep(DELAY_S) or read()
        return
    finish = main.finish

    def late(*given):
        if ranks in given:
            time.sleep(DELAY_S)
        return finish(*given)

    monkeypatch.setattr(main, "finish", late)


def delayed(group, rank, folder, flags, place):
    """The rows of three steps, in the last of which rank 1 is late, and the collectives of each."""
    config = parse([*FLAGS.split(), *flags.split(), "--out", f"{folder}/{rank}"])
    ranks, counts = ranks_of(flags, rank), []
    with pytest.MonkeyPatch.context() as patch, training_loop(config, ranks) as (loop, feed):
        for step in range(3):
            if step == 2 and rank == 1:
                late_to(place, patch, feed, ranks)
            sent = []
            names = "all_reduce", "all_gather"
            originals = [getattr(dist, name) for name in names]
            for name, call in zip(names, originals, strict=True):

                def counted(*given, name=name, call=call, sent=sent, **named):
                    sent.append((name, named.get("group") is ranks.host_group))
                    return call(*given, **named)

                setattr(dist, name, counted)
            try:
                loop._step(feed, [])
            finally:
                for name, call in zip(names, originals, strict=True):
                    setattr(dist, name, call)
            counts.append(sent)
        return loop.log.rows, counts


@pytest.mark.parametrize("place", ["data", "sums"])
@pytest.mark.parametrize("flags", SPLITS)
def test_a_late_rank_is_named(gloo_pool, tmp_path, flags, place):
    (rows, counts), *_ = gloo_pool.run(delayed, str(tmp_path), flags, place, world_size=4)
    last = rows[-1]
    assert last["slowest_rank"] == 1
    assert last["wait_ms"] > 0.6e3 * DELAY_S
    assert last["device_ms"] is None
    assert last["host_ms"] > 0
    # All that ranks tell each other in a step: the batch, the loss, and these times.
    assert [name for name, _ in counts[-1]] == ["all_gather", "all_reduce", "all_gather"]
    sharded = "--cp" in flags
    assert (last["exchange_ms"] > 0) == sharded
    assert last["exchange_under_way_ms"] >= last["exchange_ms"]


def test_one_rank_has_no_slowest(ranks, tmp_path):
    config = parse([*FLAGS.split(), "--out", str(tmp_path / "run")])
    with training_loop(config, ranks) as (loop, feed):
        loop._step(feed, [])
        (row,) = loop.log.rows
    assert row["slowest_rank"] is None and row["wait_ms"] is None
    assert row["exchange_ms"] == row["exchange_under_way_ms"] == 0


def test_exchanges_that_torch_hides_are_not_shown(ranks, tmp_path, monkeypatch):
    """A number that says nothing would be worse than none."""
    config = parse([*FLAGS.split(), "--cp", "2", "--out", str(tmp_path / "run")])
    with training_loop(config, ranks) as (loop, _):
        assert loop.sees_exchanges
        monkeypatch.setattr(main, "visible", lambda: False)
        assert loop.sees_exchanges
        monkeypatch.setattr(torch, "compile", lambda f, **options: f)
        compile_blocks(loop.model)
        kind, given = type(loop), (loop.data, None, loop.model, loop.optimizer)
        other = kind(config, ranks, *given, loop.progress, loop.log, loop.saver)
        assert not other.sees_exchanges
        monkeypatch.undo()
        assert other.sees_exchanges


def compiled(group, rank, folder):
    """The rows of a run whose blocks are compiled, without Inductor, which takes long."""
    flags = [*FLAGS.split(), *SPLITS[0].split(), "--compile", "on", "--out", f"{folder}/{rank}"]
    config, ranks, compile_with = parse(flags), ranks_of(SPLITS[0], rank), torch.compile
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo reads .grad of what FSDP gathered (torch 2.13)
        patch.setattr(torch, "compile", lambda f, **_: compile_with(f, backend="aot_eager"))
        with training_loop(config, ranks) as (loop, feed):
            for _ in range(2):
                loop._step(feed, [])
            return loop.log.rows


def test_exchanges_in_compiled_blocks_are_measured(gloo_pool, tmp_path):
    rows, *_ = gloo_pool.run(compiled, str(tmp_path), world_size=4)
    assert 0 < rows[-1]["exchange_ms"] <= rows[-1]["exchange_under_way_ms"]


def test_line_of_a_step():
    metrics = Metrics(1, 2.0, None, 1.0, 0.1, 1e4, 5e3, 2**30, 3.25, 0)
    assert _brief(metrics, True).endswith("1.00 GiB  exchange 3.2 ms")
    values = {"exchange_under_way_ms": 12.0, "slowest_rank": 1, "wait_ms": 4.5}
    more = Metrics(**{**metrics.finite(), **values, "host_ms": 30.2, "device_ms": 41.7})
    text = _brief(more, True)
    assert text.endswith("GPU 42 ms, host 30 ms  exchange 3.2 of 12.0 ms  rank 1 slowest by 4.5 ms")
    assert "exchange" not in _brief(more, False)
    assert "MFU" not in text  # on a device whose peak is not known
    known = Metrics(**{**metrics.finite(), "mfu": 0.4123})
    assert " a rank)  MFU 41.2%  1.00 GiB" in _brief(known, True)


def test_documented_names_are_those_of_the_metrics():
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()
    section = page.split("### Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall("`([a-z_]+)`", row)]
    assert sorted(names) == sorted(field.name for field in fields(Metrics))
