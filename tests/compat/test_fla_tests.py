"""The runner of FLA's own tests, with a package of FLA's shape and a test for each result."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.fla_tests import classify, failure, table

ROOT = Path(__file__).parents[2]
PACKAGE = {
    "fla/__init__.py": "",
    "fla/modules/__init__.py": "",
    "fla/ops/__init__.py": "from fla.ops.delta_rule import chunk_delta_rule",
    "fla/ops/delta_rule/__init__.py": "from fla.ops.delta_rule.chunk import chunk_delta_rule",
    "fla/ops/delta_rule/chunk.py": "def chunk_delta_rule(q, *rest, **options):\n    return q, None",
    "fla/ops/delta_rule/naive.py": """
from fla.ops.delta_rule.chunk import chunk_delta_rule

def naive(*tensors):
    return chunk_delta_rule(*tensors)[0]
""",
    "fla/utils.py": "device = 'cuda'",
}
TESTS = """
import time

import pytest
import torch

from fla.ops import chunk_delta_rule as passed_on
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.delta_rule.chunk import chunk_delta_rule as defined
from fla.ops.delta_rule.naive import naive
from fla.utils import device

q = torch.ones(1, 3, 1, 8, device=device)
beta = torch.ones(1, 3, 1)

@pytest.mark.smoke
@pytest.mark.parametrize("op", [passed_on, chunk_delta_rule, defined], ids=["a", "b", "c"])
def test_right(op):
    assert op(q, q, q, beta)[0].shape == q.shape
    assert not op(q, q, q, beta)[0].equal(q)

def other_process(rank):
    assert not chunk_delta_rule(q, q, q, beta)[0].equal(q)

def test_in_another_process():
    torch.multiprocessing.start_processes(other_process, nprocs=1, start_method="spawn")

def test_the_reference_is_theirs():
    assert naive(q, q, q, beta) is q

def test_wrong():
    assert chunk_delta_rule(q, q, q, beta)[0].equal(q)

def test_keyword():
    chunk_delta_rule(q, q, q, beta, head_first=True)

def test_value():
    chunk_delta_rule(q, q, q, beta, chunk_size=7)

def test_warning():
    with pytest.warns(UserWarning):
        chunk_delta_rule(q, q, q, beta)

def test_error():
    raise RuntimeError("no driver\\nand more")

def test_slow():
    time.sleep(60)

def test_skipped():
    pytest.skip("two GPUs")
"""
RESULTS = {
    "test_in_another_process": ("right", ""),
    "test_the_reference_is_theirs": ("not ours", ""),
    "test_wrong": ("wrong", "AssertionError"),
    "test_keyword": ("lacks", "TypeError"),
    "test_value": ("lacks", "ValueError: chunk_size"),
    "test_warning": ("lacks", "Failed: DID NOT WARN"),
    "test_error": ("error", "RuntimeError: no driver"),
    "test_slow": ("stopped", "TimeoutError: more than 20 s"),
    "test_skipped": ("skipped", "two GPUs"),
}


def test_each_result(tmp_path):
    tests = tmp_path / "tests"
    files = PACKAGE | {"tests/test_a.py": TESTS, "tests/test_b.py": "from fla.ops import gone"}
    for name, text in files.items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.fla_tests", str(tests), "--device", "cpu"]
    command += ["--limit", "20", "--jobs", "2", "--total", "120", "--out", str(out)]
    paths = os.pathsep.join((str(ROOT), str(tmp_path)))
    printed = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr

    found = {test["test"]: test for test in json.loads(out.read_text())["tests"]}
    right = [test for name, test in found.items() if "test_right[" in name]
    assert [test["result"] for test in right] == ["right"] * 3
    assert [test["calls"] for test in right] == [2] * 3
    for name, (result, reason) in RESULTS.items():
        test = found[f"test_a.py::{name}"]
        assert test["result"] == result, test
        assert test["reason"].startswith(reason) and "\n" not in test["reason"]
    assert found["test_a.py::test_in_another_process"]["calls"] == 1
    assert found["test_b.py"]["result"] == "lacks"
    assert len(found) == len(right) + len(RESULTS) + 1

    lines = printed.stdout.splitlines()
    (total,) = (line.split() for line in lines if line.startswith("all "))
    assert total == ["all", "4", "1", "4", "1", "1", "1", "1"]
    assert any(line.startswith("1 error, test_error: RuntimeError") for line in lines)


def test_what_our_own_code_lacks_is_a_fault():
    for error in (AttributeError("no such name"), NotImplementedError()):
        assert classify(error, "/there/fla_cp/ops/kda.py") == "error"
        assert classify(error, "/there/tests/test_kda.py") == "lacks"


def test_the_table_is_short():
    names = [f"{file}.py::test_{i}[{case}]" for file in "ab" for i in range(50) for case in "xy"]
    found = [failure(name, "right", "") for name in names]
    assert len(table(found[:100])) == 50 + 2, "a line for each function"
    assert [line.split()[:2] for line in table(found)[1:]] == [
        ["a.py", "100"],
        ["b.py", "100"],
        ["all", "200"],
    ]
    found[0] = failure(names[0], "wrong", "o diff")
    lines = table(found)
    assert len(lines) == 1 + 50 + 1 + 1 + 1, "a line for each function of a.py, and the reason"
    assert lines[-1] == "1 wrong, test_0: o diff"
    found = [failure(name, "error", name) for name in names]
    assert len(table(found)) <= 80
    assert table(found)[-1].startswith("and ")
