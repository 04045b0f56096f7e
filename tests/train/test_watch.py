"""The watchdog: which rank is blamed, what is printed, when a run ends.

The tests use threads first, then real ranks.
"""

import datetime
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fla_cp.comm.timing import exchange_wait, waits
from fla_cp.train import progress
from fla_cp.train.config import UserError
from fla_cp.train.exit_codes import HUNG
from fla_cp.train.meeting import meet
from fla_cp.train.outlook import Limits, Record, Seen, blamed, explain, hung
from fla_cp.train.parse import parse
from fla_cp.train.watch import Own, Watch, watched

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(notice=60, timeout=600, beat=5, silent=20)
QUICK = Limits(notice=0.2, timeout=0.6, beat=0.05, silent=0.2)
WAIT = 60  # seconds for what takes one on an idle machine


def record(**facts):
    return Record(**{"beat": 1, "host": "a", "pid": 1, "parent": 1, **facts})


def table(*records, ages=()):
    """Records that were seen this many seconds before time 1000."""
    ages = [*ages, *[0] * len(records)]
    return {rank: Seen(r, 1000 - age) for rank, (r, age) in enumerate(zip(records, ages))}  # noqa: B905


def test_silent_and_late_ranks_are_blamed():
    ahead = record(calls=5, wait="barrier", step=3, idle=61)
    behind = record(calls=4, step=3, phase="data", host="b", idle=62)
    in_exchange = record(calls=4, exchanges=7, wait="exchange of states")
    assert blamed(table(ahead, behind, ahead), 1000, LIMITS) == [1]
    assert blamed(table(ahead, behind, in_exchange), 1000, LIMITS) == [1]
    # all are in an exchange except one that computes, or is silent
    assert blamed(table(in_exchange, record(calls=4, exchanges=6)), 1000, LIMITS) == [1]
    assert blamed(table(ahead, ahead, ahead, ages=[0, 0, 30]), 1000, LIMITS) == [2]
    # a rank that is behind can itself wait for one further behind
    assert blamed(table(ahead, in_exchange, in_exchange), 1000, LIMITS) == [1, 2]
    assert blamed(table(ahead, ahead), 1000, LIMITS) == []


def test_text_names_step_phase_collective_rank_and_host():
    ahead = record(calls=5, wait="barrier", step=12, phase="data", idle=61)
    behind = record(calls=4, step=11, phase="backward", host="b", idle=62, at="model.py:7")
    text = explain(table(ahead, behind, ahead), 1000, LIMITS)
    assert text == (
        "ranks 0, 2 (host a) wait in barrier (step 12, data) for "
        "rank 1 (host b), last seen in step 11, backward, model.py:7 since 62 s"
    )
    text = explain(table(ahead, behind, ages=[0, 33]), 1000, LIMITS)
    assert "rank 1 (host b), last seen in step 11, backward, model.py:7: no sign of life" in text
    assert "for 33 s" in text
    many = explain(table(*[ahead] * 40, *[behind] * 40), 1000, LIMITS)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more" in many and len(many) < 1000
    assert "no rank is known to be behind" in explain(table(ahead, ahead), 1000, LIMITS)


def test_a_run_is_hung_when_no_rank_gets_on_and_none_is_in_a_long_phase():
    waiting, stuck = record(idle=601, wait="barrier"), record(idle=601)
    assert hung(table(waiting, stuck), 1000, LIMITS)
    assert not hung(table(waiting, record(idle=5)), 1000, LIMITS)
    assert not hung(table(record(idle=500), record(idle=500)), 1000, LIMITS)
    # rank 0 alone in a parity check, a first step that compiles, a checkpoint: its process lives
    assert not hung(table(waiting, record(idle=5000, long=True)), 1000, LIMITS)
    # or it was stopped in such a phase
    assert hung(table(waiting, record(idle=5000, long=True), ages=[0, 600]), 1000, LIMITS)
    # it made progress just before it was stopped; nobody read the records until `look`
    stopped = record(idle=0)
    assert hung(table(waiting, stopped, ages=[0, 600 - LIMITS.look]), 1000, LIMITS)
    assert not hung(table(waiting, stopped, ages=[0, 100]), 1000, LIMITS)


def test_default_limits_read_rarely_and_before_the_notice():
    limits = Limits.of(60, 600)
    assert (limits.beat, limits.silent, limits.look) == (5, 20, 40)
    for notice, timeout in ((1, 1), (600, 60), (1e6, 1e6)):
        limits = Limits.of(notice, timeout)
        assert limits.beat >= 1 and 0 < limits.look <= max(limits.beat, timeout / 2)


def test_time_in_which_this_process_was_stopped_is_no_hang():
    own = Own(progress=(1, 0), since=0.0, looked=0.0)
    assert own.look((1, 0), 5.0, beat=5) == 5
    assert own.look((1, 0), 1000.0, beat=5) == 5
    assert own.look((1, 0), 1005.0, beat=5) == 10
    assert own.look((2, 0), 1010.0, beat=5) == 0


class Ended(Exception):
    pass


@pytest.fixture
def watch():
    """Makes watchdogs on a store with records of other ranks; ends of the process go to `ends`."""
    made = []

    def make(rank, *others, store=None, limits=QUICK):
        store = dist.HashStore() if store is None else store
        for r, other in enumerate(others):
            if r != rank:
                store.set(str(r), other.to_json())
        ends = queue.Queue()

        def end(code):
            ends.put(code)
            raise Ended

        made.append(Watch(store, rank, max(2, len(others)), limits, end=end))
        made[-1].ends = ends
        return made[-1]

    progress.mark("data", step=3)
    yield make
    for one in made:
        one.close()


def started(watch, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # Ended
    watch.start()
    return watch


def test_stopped_rank_is_named_and_ends_the_run(watch, monkeypatch, capsys):
    stopped = record(host="far", step=2, phase="data", calls=progress.doing.calls)
    with progress.waiting("barrier of all ranks"):
        one = started(watch(0, record(), stopped), monkeypatch)
        assert one.ends.get(timeout=WAIT) == HUNG
    err = capsys.readouterr().err
    notice, *_, last = err.splitlines()
    place = r"rank 0 \(host .*\) waits in barrier of all ranks \(step 3, data\) for rank 1 "
    assert re.match(rf"waiting for \d s: {place}\(host far\), last seen in step 2", notice)
    assert last.startswith("error: the run is hung: no rank has made progress for")
    assert "rank 1 (host far), last seen in step 2, data: no sign of life" in last
    assert one.verdict


def test_lowest_living_rank_prints_if_rank_0_is_stopped(watch, monkeypatch, capsys):
    first, last = record(step=3, phase="metrics"), record(idle=1, wait="barrier", calls=99)
    one = started(watch(1, first, record(), last), monkeypatch)
    assert one.ends.get(timeout=WAIT) == HUNG
    err = capsys.readouterr().err
    assert "rank 0 (host a), last seen in step 3, metrics: no sign of life" in err


def test_rank_is_silent_while_a_lower_one_lives_and_obeys_its_verdict(watch, monkeypatch, capsys):
    one = started(watch(1, record(), record()), monkeypatch)
    deadline = time.monotonic() + 4 * QUICK.timeout
    beat = 1
    while time.monotonic() < deadline:
        beat += 1
        one.store.set("0", record(beat=beat, idle=1).to_json())
        time.sleep(QUICK.beat / 2)
    assert one.ends.empty()
    one.store.set("verdict", "{}")
    assert one.ends.get(timeout=WAIT) == HUNG
    assert capsys.readouterr().err == ""


def test_notice_is_followed_by_a_word_when_the_run_goes_on(watch, monkeypatch, capsys):
    limits = Limits(notice=0.2, timeout=1e3, beat=0.05, silent=0.2)
    one = started(watch(0, record(), record(), limits=limits), monkeypatch)
    seen = ""
    deadline = time.monotonic() + WAIT
    while "waiting for" not in seen and time.monotonic() < deadline:
        time.sleep(0.05)
        seen += capsys.readouterr().err
    while "going on: step 4, data" not in seen and time.monotonic() < deadline:
        progress.mark("data", step=4)
        time.sleep(0.05)
        seen += capsys.readouterr().err
    assert "going on: step 4, data" in seen
    assert one.ends.empty()


def test_rank_ends_though_the_store_has_stopped_answering(watch, monkeypatch, capsys):
    class Deaf:
        """A store whose process is stopped: calls do not return."""

        def __init__(self):
            self.back = threading.Event()

        def set(self, key, value):
            self.back.wait(WAIT)
            raise RuntimeError("store is gone")

    monkeypatch.setenv("MASTER_ADDR", "far")
    store = Deaf()
    store.set, later = (lambda key, value: None), store.set
    one = watch(1, store=store)
    store.set = later
    with progress.waiting("barrier of all ranks"):
        started(one, monkeypatch)
        assert one.ends.get(timeout=WAIT) == HUNG
    store.back.set()
    err = capsys.readouterr().err
    assert "waiting: no answer for" in err
    assert "error: the run is hung: no answer for" in err
    assert "from the store of the rendezvous at far:" in err
    assert "stands in step 3, data, in barrier of all ranks" in err


def test_lost_rank_is_one_line_and_other_errors_are_left_alone(watch, capsys):
    one = watch(0)
    one.settle(KeyError("mine"))
    one.settle(RuntimeError("CUDA error: an illegal memory access was encountered"))
    lost = "[../gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:7"
    waits.now = "exchange of states"
    with pytest.raises(Ended):
        one.settle(RuntimeError(lost))
    waits.now = ""
    (line,) = capsys.readouterr().err.splitlines()
    assert "has lost another rank in step 3, data, in exchange of states: Connection closed" in line
    assert one.ends.get_nowait() == HUNG


def test_threads_and_store_end_with_the_run():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in range(2):
        store.set(str(rank), record().to_json())
    with watched(store, 0, 2, 60, 600) as one:
        names = {thread.name for thread in threading.enumerate()}
        assert {"watch-_guard", "watch-_carry"} <= names
    assert not any(thread.is_alive() for thread in one.threads)
    assert one.store is None
    with watched(store, 0, 1, 60, 600) as one:
        assert one is None


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_rendezvous_names_the_ranks_that_are_missing(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        meet(0, 3, 1)
    assert ended.value.code == HUNG
    err = capsys.readouterr().err
    assert err.startswith("error: rendezvous: 1, 2 of 3 ranks are missing after 1 s")
    assert f"here are 0, on {socket.gethostname()}" in err


def test_rendezvous_without_a_store_says_where_it_looked(monkeypatch, capfd):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        meet(1, 2, 1)
    assert ended.value.code == HUNG
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert f"rank 1 (host {socket.gethostname()}) has no answer from localhost:{port}" in errors[0]


def test_all_ranks_meet(monkeypatch):
    port = free_port()
    store = dist.TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(0, 60)
    )
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    store.set("start 0/0", record(host="far").to_json())
    met = meet(1, 2, 60)
    assert Record.from_json(met.get("0")).host == "far"
    assert Record.from_json(met.get("1")).pid == os.getpid()


def test_marks_cost_nothing_compared_with_a_step():
    def marked():
        progress.mark("forward")

    def exchanged():
        with exchange_wait(torch.device("cpu")):
            pass

    count = waits.count
    assert min(timeit.repeat(marked, number=1000, repeat=5)) / 1000 < 5e-6
    exchanged()
    assert waits.count == count + 1 and waits.now == ""


def test_announced_phases_are_long_and_those_inside_too():
    progress.mark("forward", first=True)
    assert progress.doing.long
    progress.mark("forward")
    assert not progress.doing.long
    with progress.announced("checkpoint"):
        assert progress.doing.phase == "checkpoint"
        with progress.waiting("barrier of all ranks"):
            assert progress.doing.wait and progress.doing.long
        progress.mark("forward")
        assert progress.doing.long
    assert not progress.doing.long and progress.doing.wait == ""


@pytest.mark.parametrize("flag", ["notice", "timeout", "rendezvous"])
@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf"])
def test_seconds_are_checked(flag, value):
    with pytest.raises(UserError, match=rf"--parallel\.{flag}-seconds must be (in|finite)"):
        parse([f"--parallel.{flag}-seconds", value])


class Lines:
    """The lines that a process has printed so far, read by a thread."""

    def __init__(self, process):
        self.lines = []
        self.thread = threading.Thread(target=self.read, args=(process.stdout,), daemon=True)
        self.thread.start()

    def read(self, stream):
        with stream:
            for line in stream:
                self.lines.append(line.rstrip())

    def wait_for(self, pattern, process, start=0, timeout=240):
        """The first matching line, from line `start` on."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            for line in self.lines[start:]:
                if re.search(pattern, line):
                    return line
            if ended and not self.thread.is_alive():
                break
            time.sleep(0.05)
        pytest.fail(f"no {pattern!r} in\n" + "\n".join(self.lines))


def rank_pids(launcher):
    """{rank: pid} of the ranks that a launcher has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == launcher:
                environment = (folder / "environ").read_text().split("\0")
                rank = next(e for e in environment if e.startswith("RANK=")).removeprefix("RANK=")
                found[int(rank)] = int(folder.name)
        except (OSError, StopIteration):
            continue
    return found


NEEDS_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPUS)])
def test_stopped_ranks_are_named_and_end_the_run(device, tmp_path):
    """In one run, rank 1 is stopped and continued; then rank 0 is stopped for good."""
    flags = [
        *("--model.layers", "1", "--model.hidden-size", "16", "--model.num-heads", "1"),
        *("--model.head-dim", "16", "--device", device, "--data", "synthetic", "--seq-len", "64"),
        *("--cp", "2", "--max-steps", "1000000", "--eval-every", "0", "--log-every", "1000000"),
        *("--parallel.notice-seconds", "3", "--parallel.timeout-seconds", "10"),
        *("--tracker", "none", "--out", str(tmp_path / "run")),
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = Lines(process)
    try:
        lines.wait_for(r"step +1/", process)
        ranks = rank_pids(process.pid)
        start = len(lines.lines)
        os.kill(ranks[1], signal.SIGSTOP)
        line = lines.wait_for("^waiting for .*rank 1", process, start)
        os.kill(ranks[1], signal.SIGCONT)
        assert re.search(r"rank 0 \(host .*\) waits in .* \(step \d+, .*\) for rank 1 ", line)
        lines.wait_for("^going on: step", process, start)
        os.kill(ranks[0], signal.SIGSTOP)
        line = lines.wait_for("^error: the run is hung", process)
        assert re.search(r"rank 1 \(host .*\) waits in .* for rank 0 \(host .*\), last seen", line)
        assert "no sign of life" in line
        assert process.wait(60) != 0
        assert not any("Traceback" in line for line in lines.lines)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines.thread.join(WAIT)
