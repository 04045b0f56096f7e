"""A tiny model learns to recall needles, and docs/evaluation.md says what was measured of it."""

import json
import os
import shlex
import struct
import subprocess

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("matplotlib")

from benchmarks import recall
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

RESULT = ROOT / "benchmarks" / "results" / "current" / "recall.json"
PAGE = ROOT / "docs" / "evaluation.md"
LENGTHS = "32,64,128"

ON_ONE_CORE = """
import os, runpy, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Two threads that wait for each other beside other tests take many times as long as one."""


def on_one_core(name, *words):
    command = [*warm_python(), "-c", ON_ONE_CORE, str(ROOT / "launch" / name), *map(str, words)]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def recalled(run, steps, seed):
    """{length: share of right answers} after so many steps of the page's training."""
    few = ["--max-steps", steps, "--seed", seed, "--eval-every", 0, "--tracker", "none"]
    on_one_core("train.py", *recall.TRAINING.split(), *few, "--out", run)
    asked = ["--packs", 0, "--needle", LENGTHS, "--needle-depths", 3, "--needle-count", 8]
    on_one_core("evaluate.py", run, *asked, "--out", run / "a.png")
    assert (run / "a.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((run / "a.json").read_text())["needle"]
    return {length: sum(row.values()) / len(row) for length, row in found.items()}


@pytest.mark.wide
def test_a_tiny_model_learns_to_recall(tmp_path):
    """Half the steps are enough for this seed; after one step the answers are guesses."""
    before = recalled(tmp_path / "before", 1, 1)
    after = recalled(tmp_path / "after", 80, 1)
    assert list(after) == LENGTHS.split(",")
    for length, share in after.items():
        assert before[length] < 0.4 < 0.7 <= share, (length, before, after)


def test_the_page_has_the_training_that_was_measured():
    """And how long it took, and its picture."""
    page, result = PAGE.read_text(), json.loads(RESULT.read_text())
    assert result["training"] == recall.TRAINING
    (line,) = [x for x in page.splitlines() if x.startswith("fla-cp-train --data needle")]
    words = shlex.split(line)[1:]
    assert words[: words.index("--out")] == recall.TRAINING.split()
    seconds = [run["cpu_s"] for run in result["runs"]]
    prose = " ".join(page.split())
    assert f"mean of {len(seconds)} trainings with different seeds" in prose
    assert f"{min(seconds):.0f} to {max(seconds):.0f} s of processor time" in prose
    took = [run["training_s"] for run in result["runs"]]
    assert f"took {min(took):.0f} to {max(took):.0f} s, and" in prose
    assert "](recall.png)" in page


def test_a_result_is_drawn(tmp_path):
    result = json.loads(RESULT.read_text())
    recall.draw(result, tmp_path / "a.png")
    sizes = [
        struct.unpack(">II", path.read_bytes()[16:24])
        for path in (tmp_path / "a.png", ROOT / "docs" / "recall.png")
    ]
    assert sizes[0] == sizes[1]


def test_a_seed_is_trained_and_evaluated(tmp_path, monkeypatch):
    """As the programs are called, without running them."""
    called = []

    def script(name, *words):
        called.append((name, *words))
        if name == "evaluate.py":
            table = {"32": {"0.0": 0.5, "1.0": 1.0}}
            (tmp_path / "a.json").write_text(json.dumps({"needle": table}))
        return ""

    monkeypatch.setattr(recall, "script", script)
    row = recall.measured(3, tmp_path, "--max-steps 2", (32,))
    assert [name for name, *_ in called] == ["train.py", "evaluate.py"]
    assert "--seed 3" in " ".join(called[0]) and "--needle 32" in " ".join(called[1])
    assert row["seed"] == 3 and row["training_s"] >= 0
    other = {**row, "recall": {"32": {"0.0": 0.0, "1.0": 1.0}}}
    assert recall.mean_recall({"runs": [row, other]}) == {32: {0.0: 0.25, 1.0: 1.0}}
    assert os.listdir(tmp_path) == ["a.json"]
