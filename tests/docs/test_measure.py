"""Benchmarks run side by side, and whole calls with other tiles."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import fla_cp
from benchmarks import forced, measure, tune
from fla_cp.kernels.triton import tile_table

NOTING = """
import os, sys, time
name, seconds, code = sys.argv[1:4]
def note(what):
    with open("notes", "a") as f:
        f.write(f"{what} {name} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
note("begin")
time.sleep(float(seconds))
note("end")
sys.exit(int(code))
"""
"""A program that notes when it begins and ends, and on which GPUs."""


def test_measure_starts_what_fits_and_is_not_done(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.py").write_text(NOTING)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "PAUSE", 0.01)

    def command(run, folder):
        return [sys.executable, "run.py", run.name, *run.arguments.split()]

    monkeypatch.setattr(measure, "command", command)
    runs = (
        measure.Run("done", "report", "0 0", 1),
        measure.Run("quiet", "report", "0.3 0", 1, alone=True),
        measure.Run("wrong", "report", "0.3 1", 1),
        measure.Run("right", "report", "0.3 0", 1),
        measure.Run("long", "report", "0 0", 10_000),
        measure.Run("hung", "report", "1000 0", 1, gpus=2),
        measure.Run("wide", "report", "0 0", 1, gpus=3),
    )
    monkeypatch.setattr(measure, "RUNS", runs)
    notes = tmp_path / "notes"

    def clock():
        """The limit passes once the last run has begun, however busy the machine is."""
        return 1000.0 * (notes.exists() and "begin hung" in notes.read_text())

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    (tmp_path / "done.json").write_text("{}")
    given = ["measure", "--out", str(tmp_path), "--limit", "8", "--gpus", "2"]
    monkeypatch.setattr(sys, "argv", given)
    assert measure.main() == 1
    said = capsys.readouterr().out
    assert "long: needs 10000 s, 8 are left" in said
    words = dict(line.split(": ") for line in said.splitlines()[-5:])
    assert words == {
        "quiet": "done",
        "wrong": "FAILED",
        "right": "done",
        "long": "not started",
        "hung": "stopped",
    }
    lines = [line.split() for line in notes.read_text().splitlines()]
    at = lines.index(["begin", "quiet", "5"])
    assert lines[at + 1] == ["end", "quiet", "5"]  # nothing begins or ends meanwhile
    assert {gpu for _, name, gpu in lines if name in ("wrong", "right")} == {"5", "7"}
    assert ["begin", "hung", "5,7"] in lines
    assert {name for _, name, _ in lines} == {"quiet", "wrong", "right", "hung"}
    with pytest.raises(SystemExit, match="--only must be of done, quiet"):
        measure.chosen(["other"], 1, tmp_path)


@pytest.mark.parametrize("run", measure.RUNS, ids=lambda run: run.name)
def test_measure_knows_the_flags_of_each_benchmark(run):
    module = importlib.import_module(f"benchmarks.{run.module}")
    flags = [x.split("=")[0] for x in run.arguments.split() if x.startswith("--")]
    source = Path(module.__file__).read_text()
    for flag in flags:
        assert f'add_argument("{flag}"' in source, flag


def test_forced_tiles(tmp_path, monkeypatch, capsys):
    out = tmp_path / "forced.json"
    given = ["forced", "--shapes", "cpu,70x1-any", "--threshold", "0", "--out", str(out)]
    given += ["--threshold-of-all", "1"]
    given += ["--tiles", "intra_any=STEEP,intra_bwd=QUARTERS_BWD"]
    monkeypatch.setattr(sys, "argv", given)
    seen, original = set(), fla_cp.chunk_kda

    def noted(*x, **options):
        tuning = tune.now().tuning
        seen.add((tuning.forced, tuning.min_local_chunk_heads, tuning.min_chunk_heads))
        return original(*x, **options)

    monkeypatch.setattr(fla_cp, "chunk_kda", noted)
    forced.main()
    tiles = ("intra_any", tile_table.STEEP), ("intra_bwd", tile_table.QUARTERS_BWD)
    chosen = tile_table.TUNING
    assert seen == {((), chosen.min_local_chunk_heads, chosen.min_chunk_heads), (tiles, 0, 1)}
    rows = json.loads(out.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["cpu", "70x1-any"]
    for row in rows:
        assert row["difference"] == 0  # without a GPU both sides run the torch stages
        assert all(len(row["both"][side]) == forced.TURNS for side in ("chosen", "forced"))
    assert "| kda | 70x1-any |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--tiles must be STAGE=TILE.* got 'intra=NONE'"):
        forced.tiles_of("intra=NONE")
    with pytest.raises(SystemExit, match=r"--shapes must be of target.* got '70'"):
        forced.shape_of("70")
    assert forced.tiles_of("intra_any=STEEP") == {"intra_any": tile_table.STEEP}
