"""Training on two hosts equals training on one: gloo over a network, one torchrun agent a host."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ADDRESSES, NoNamespaces, run_on_two_hosts, two_hosts

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
FLAGS = [
    *("--device", "cpu", "--data", "synthetic", "--model", "tiny", "--seed", "1"),
    *("--seq-len", "200", "--global-batch-size", "2", "--max-steps", str(STEPS)),
    *("--eval-every", "0", "--checkpoint-every", "0"),
]

RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), float(dist.get_rank()))
dist.all_reduce(x)
# one write, so that ranks do not mix inside a line
sys.stdout.write(f"sum {x.tolist()} of {dist.get_world_size()} at {os.environ['MASTER_ADDR']}\\n")
dist.destroy_process_group()
"""


def run_or_skip(command, folder, timeout=900):
    try:
        return run_on_two_hosts(command, 2, folder, timeout)
    except NoNamespaces as error:
        pytest.skip(str(error))


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def steps(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["loss"] is not None}


def test_hosts_have_one_address_each_and_vanish():
    try:
        with two_hosts() as names:
            assert all(name in namespaces() for name in names)
            for i, name in enumerate(names):
                shown = ["ip", "-n", name, "-brief", "address", "show", "scope", "global"]
                lines = subprocess.run(shown, capture_output=True, text=True).stdout.splitlines()
                assert [line.split()[2] for line in lines] == [f"{ADDRESSES[i]}/24"]
            raise KeyError("a test fails inside")
    except NoNamespaces as error:
        pytest.skip(str(error))
    except KeyError:
        pass
    assert not any(name in namespaces() for name in names)


@pytest.mark.wide
def test_ranks_of_two_hosts_reduce_together(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    output = run_or_skip(["rank.py"], tmp_path, timeout=600)
    assert output.count(f"sum [6.0, 6.0, 6.0] of 4 at {ADDRESSES[0]}") == 4


@pytest.mark.wide
def test_failing_rank_ends_both_hosts_with_its_output(tmp_path):
    (tmp_path / "rank.py").write_text(RANK + "raise SystemExit('rank gave up')")
    try:
        with pytest.raises(RuntimeError, match=r"(?s)two hosts: exit codes.*rank gave up"):
            run_on_two_hosts(["rank.py"], 2, tmp_path, timeout=600)
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert f"-{os.getpid()}" not in namespaces()


@pytest.mark.slow
@pytest.mark.wide
def test_two_hosts_train_like_one_rank(tmp_path):
    script = str(ROOT / "launch" / "train.py")
    run_or_skip([script, "--cp", "4", "--out", "two", *FLAGS], tmp_path)
    single = [sys.executable, script, "--cp", "1", "--out", "one", *FLAGS]
    subprocess.run(single, cwd=tmp_path, check=True, timeout=900)
    expected, actual = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    for step, row in expected.items():
        assert math.isfinite(row["loss"])
        assert actual[step]["loss"] == pytest.approx(row["loss"], rel=1e-4), f"step {step}"
        assert actual[step]["exchange_ms"] > 0, "no document crossed a rank: nothing was tested"
