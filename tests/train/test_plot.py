"""fla-cp-plot: what it reads, what it draws, and its messages."""

import builtins
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from fla_cp.train import cli, plot
from fla_cp.train.config import UserError
from fla_cp.train.metrics import Metrics
from fla_cp.train.plot import Run, draw, read_runs, smoothed

PNG = b"\x89PNG"


def metrics(step, **more):
    first = step == 0
    values = {
        "step": step,
        "loss": None if first else 5 / step,
        "eval_loss": 4.0 if first else None,
        "grad_norm": None if first else 1.0,
        "lr": 1e-3,
        "tokens_per_second": None if first else 100.0 * step,
        "tokens_per_second_per_gpu": None if first else 50.0 * step,
        "peak_memory_bytes": 2**30 * (step + 1),
        "exchange_ms": 0.0,
        "skipped": 0,
    }
    return asdict(Metrics(**(values | more)))


def run(folder: Path, steps=6, **more):
    folder.mkdir(parents=True)
    lines = [json.dumps(metrics(step, **more)) + "\n" for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "lo')
    (folder / "config.toml").write_text("[data]\nglobal_batch_size = 3\nseq_len = 10\n")
    return folder


def drawn(monkeypatch):
    """What is drawn into each axes: label, x and y of each line."""
    figure = pytest.importorskip("matplotlib.figure")
    found = []
    before = figure.Figure.savefig

    def savefig(self, *args, **named):
        for axes in self.axes:
            lines = axes.get_lines()
            found.append([(x.get_label(), list(x.get_xdata()), list(x.get_ydata())) for x in lines])
        return before(self, *args, **named)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return found


def test_command_draws_all_runs(tmp_path, monkeypatch, capsys):
    found = drawn(monkeypatch)
    a, b = run(tmp_path / "a"), run(tmp_path / "b", steps=4, mfu=0.5)
    out = tmp_path / "both.png"
    assert plot.main([str(a), str(b), "--out", str(out), "--x", "tokens"]) == 0
    assert out.read_bytes().startswith(PNG)
    losses, speeds = found
    assert [label for label, x, y in losses if not label.startswith("_")] == ["a", "b", "held-out"]
    assert losses[0] == ("a", [30, 60, 90, 120, 150], [5, 5 / 2, 5 / 3, 5 / 4, 1])
    assert losses[1][1:] == ([0], [4.0])
    # the first steps compile
    assert [x[1:] for x in speeds] == [([90, 120, 150], [300, 400, 500]), ([90], [300])]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "5", "1.0000", "4.0000", "400", "-", "6.00"] in printed
    assert ["b", "3", "1.6667", "4.0000", "300", "50.0%", "4.00"] in printed


def test_tokens_are_those_that_the_run_recorded(tmp_path):
    """The configuration is that of the last part, for which the batch was made larger."""
    folder = run(tmp_path / "a", steps=0)
    for before, wanted in [
        ({"tokens": 10}, [0, 10, 20, 50, 80]),  # recorded from the first step on
        ({}, [0, 10, 20, 50, 80]),  # an older version wrote steps 0 to 1
    ]:
        rows = [metrics(0), metrics(1, **before)]
        rows += [metrics(n, tokens=tokens) for n, tokens in ((2, 20), (3, 50), (4, 80))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (found,) = read_runs([folder], "tokens")
        assert [row["tokens"] for row in found.rows] == wanted
        assert found.series("loss")[0] == wanted[1:]
    (folder / "config.toml").unlink()  # which is not needed then
    assert read_runs([folder], "tokens") == [found]


def test_smooth_lines_and_single_steps(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    draw([Run("a", [metrics(n) for n in range(6)])], tmp_path / "a.png", smooth=2)
    (single, line, *_), _ = found
    assert single[2] == [5, 5 / 2, 5 / 3, 5 / 4, 1]
    assert line[2] == pytest.approx([5, 15 / 4, 25 / 12, 35 / 24, 9 / 8])


def test_smoothed():
    assert smoothed([4.0, 2.0, 0.0, 6.0], 1) == [4, 2, 0, 6]
    assert smoothed([4.0, 2.0, 0.0, 6.0], 3) == pytest.approx([4, 3, 2, 8 / 3])
    assert smoothed([], 3) == []


def test_labels_are_the_shortest_ends_that_differ(tmp_path):
    names = "x/a", "y/a", "y/b", "y/x/a"
    folders = [run(tmp_path / name) for name in names]
    assert [r.label for r in read_runs(folders[1:3], "step")] == ["a", "b"]
    assert [r.label for r in read_runs(folders[:3], "step")] == ["x/a", "y/a", "b"]
    found = [r.label for r in read_runs(folders, "step")]
    assert found == [f"{tmp_path.name}/x/a", "y/a", "b", "y/x/a"]
    assert plot.labels([Path("/a"), Path("/b/a")]) == ["/a", "b/a"]


def test_a_run_that_is_given_twice_is_drawn_once(tmp_path, monkeypatch):
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    (tmp_path / "link").symlink_to(b)
    monkeypatch.chdir(tmp_path)
    given = [b, a, Path("a"), tmp_path / "link", b]
    assert [r.label for r in read_runs(given, "step")] == ["b", "a"]


def test_runs_may_follow_options(tmp_path, monkeypatch):
    found = drawn(monkeypatch)
    a, b = (str(run(tmp_path / name)) for name in "ab")
    assert plot.main([a, "--x", "tokens", b, "--out", str(tmp_path / "both.png")]) == 0
    labels = [label for label, _, _ in found[0] if not label.startswith("_")]
    assert labels == ["a", "b", "held-out"]


def test_refusals(tmp_path, capsys):
    unreadable = tmp_path / "unreadable"
    (unreadable / "metrics.jsonl").mkdir(parents=True)
    empty, good = tmp_path / "empty", run(tmp_path / "good")
    empty.mkdir()
    bare = run(tmp_path / "bare")
    (bare / "config.toml").unlink()
    for arguments, message in [
        ([empty], f"RUN must be a run folder with lines in metrics.jsonl, got {empty}"),
        ([tmp_path / "none"], "RUN must be a run folder"),
        ([unreadable], f"RUN: cannot read {unreadable / 'metrics.jsonl'}: Is a directory"),
        ([bare, "--x", "tokens"], f"does not count tokens, which {bare} lacks"),
        ([good, "--smooth", "0"], "--smooth must be at least 1, got 0"),
        ([good, "--out", tmp_path / "no" / "a.png"], "--out must be in a folder that exists"),
        ([good, "--out", tmp_path / "a.xyz"], "--out must end in one of ."),
        ([good, "--out", tmp_path / "a"], "--out must end in one of ."),
        ([good, "--out", tmp_path], "--out must end in one of ."),
        ([good, "--out", "/dev/full/a.png"], "--out must be in a folder that exists"),
    ]:
        assert plot.main([str(a) for a in arguments]) == 2
        assert re.search(re.escape(message), capsys.readouterr().err)
    assert not [*tmp_path.glob("**/*.png"), *tmp_path.parent.glob("*.png")]


def test_matplotlib_is_named(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def missing(name, *args, **named):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", missing)
        with pytest.raises(UserError, match=r"needs matplotlib: pip install 'fla_cp\[plot\]'"):
            draw([], tmp_path / "a.png")
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert cli.run_plot() == 2
    wanted = "fla-cp-plot needs matplotlib: pip install 'fla_cp[train,plot]'"
    assert wanted in capsys.readouterr().err
