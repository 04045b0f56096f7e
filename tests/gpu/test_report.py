"""What `python -m tests.gpu` leaves behind."""

import json
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import __main__ as runner
from tests.gpu import checks, kept_rows, rows_path, warn_if_stale

EVERY = [runner.SANITIZER, *checks.parts()]


def run(out, monkeypatch, parts):
    """A run whose parts are `parts`."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(runner, "run_parts", parts)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--out", str(out)])
    return runner.main()


def test_a_run_that_is_stopped_leaves_what_has_ended(tmp_path, monkeypatch):
    """The next run, on the same kernels, has only the other parts."""
    out, asked = tmp_path / "report.json", []

    def stopped(names, jobs, limit):
        yield names[1], [{"case": "right", "ok": True}]
        yield names[0], [{"case": "wrong", "ok": False}]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, monkeypatch, stopped)
    report = json.loads(out.read_text())
    assert (report["passed"], report["failed"], report["missing"]) == (1, 1, EVERY[2:])
    assert len(rows_path(out).read_text().splitlines()) == 2

    def rest(names, jobs, limit):
        asked.extend(names)
        yield from ((name, [{"case": "right", "ok": True}]) for name in names)

    assert run(out, monkeypatch, rest) == 0
    assert asked == [EVERY[0], *EVERY[2:]]
    report = json.loads(out.read_text())
    assert (report["passed"], report["failed"], report["missing"]) == (len(EVERY), 0, [])


def test_a_part_without_memory_runs_again_by_itself(monkeypatch):
    """At the end, and only once."""
    started = []

    class Part:
        """Ends at once. "middle" finds no memory at first, and "large" never does."""

        def __init__(self, command, *, stdout, **_):
            name = command[-1]
            started.append(name)
            lacks = name == "large" or (name == "middle" and started.count(name) == 1)
            row = {"case": name, "ok": not lacks}
            if lacks:
                row["error"] = "CUDA out of memory. Tried to allocate 16.00 MiB."
            stdout.write("ROWS " + json.dumps([row]) + "\n")

        def poll(self):
            return 0

    monkeypatch.setattr(runner.subprocess, "Popen", Part)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = dict(runner.run_parts(["middle", "large", "small"], 2, 30.0))
    assert started == ["middle", "large", "small", "middle", "large"]
    assert [name for name, (row,) in found.items() if not row["ok"]] == ["large"]
    assert set(found) == {"middle", "large", "small"}


def test_a_report_without_its_rows_is_said_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    out = tmp_path / "report.json"

    def all_parts(names, jobs, limit):
        yield from ((name, [{"case": "right", "ok": True}]) for name in names)

    assert run(out, monkeypatch, all_parts) == 0
    rows_path(out).unlink()
    capsys.readouterr()
    warn_if_stale(out, EVERY)
    assert capsys.readouterr().out.splitlines() == [
        "warning: report_rows.jsonl, the single results of report.json, is not there."
    ]
    assert kept_rows(out) == {}
