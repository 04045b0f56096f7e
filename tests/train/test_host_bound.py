"""The note that the GPU waits for the host, and the flags that it names."""

from types import SimpleNamespace

import pytest
import torch

from fla_cp.train.host_bound import FIRST, IN_A_ROW, HostBound
from fla_cp.train.parse import parse
from tests.support.loops import steps_taken

GPU = SimpleNamespace(device=torch.device("cuda"))
LINE = "note: the GPU waits for the host, which took 99 of 100 ms in this step: more tokens per "
LINE += "rank would take little longer"


def batch_of(*offsets):
    return [SimpleNamespace(share=SimpleNamespace(cu_seqlens=torch.tensor(x))) for x in offsets]


def notes(flags, packings, host=99.0, device=100.0, captured=False):
    """The lines of a run that repeats the packings of its micro-batches."""
    watch, found = HostBound(parse(flags.split()), GPU), []
    for n in range(2 * (FIRST + IN_A_ROW)):
        batch = batch_of(*packings[n % len(packings)])
        line = watch.note(batch, host, device, captured)
        if line is not None:
            found.append((n + 1, line))
    return found


def test_it_is_said_once_after_some_steps():
    assert notes("--cuda-graphs off", [[[0, 512]]]) == [(FIRST + IN_A_ROW, LINE)]


@pytest.mark.parametrize(
    "changed", [{"host": 97.0}, {"captured": True}, {"device": None}], ids=lambda x: next(iter(x))
)
def test_it_is_not_said_otherwise(changed):
    """The host is ahead, a graph runs, or there is no GPU."""
    assert notes("", [[[0, 512]]], **changed) == []


def test_steps_must_wait_in_a_row():
    watch, batch = HostBound(parse([]), GPU), batch_of([0, 512])
    for n in range(5 * (FIRST + IN_A_ROW)):
        host = 50.0 if n % IN_A_ROW == 0 else 100.0
        assert watch.note(batch, host, 100.0, False) is None


# the most documents are nine
ALIKE, OTHERS = [[[0, 512]]], [[[0, 100, 512]], [[0, *range(100, 108), 512]]]


@pytest.mark.parametrize(
    "flags, packings, named",
    [
        ("", ALIKE, "--cuda-graphs on"),
        ("", OTHERS, "--cuda-graphs on --data.max-documents 11"),
        ("", [[[0, 512], [0, 9, 512]]], "--cuda-graphs on --data.max-documents 2"),
        ("--cuda-graphs on", OTHERS, "--cuda-graphs on --data.max-documents 11"),
        ("--cuda-graphs on", ALIKE, None),
        ("--cuda-graphs on --data.max-documents 4", OTHERS, None),
        ("--cuda-graphs off", OTHERS, None),
        ("--compile on", OTHERS, None),
        ("--model.experts 4 --dtype float32", ALIKE, None),
        ("--model.pattern kda,mla --cp 2", OTHERS, "--cuda-graphs on --data.max-documents 11"),
        ("--model.pattern kda,mla --cp 2 --parallel.layout zigzag", OTHERS, None),
        ("--global-batch-size 8 --micro-batch-size 1", ALIKE, None),
    ],
)
def test_flags_that_may_help(flags, packings, named):
    """They are those that the trainer would take, and those that this run does not have."""
    ((_, line),) = notes(flags, packings)
    assert line == (LINE if named is None else f"{LINE}, and {named} may make steps faster")
    if named is not None:
        parse([*flags.replace("--cuda-graphs on", "").split(), *named.split()])


def test_the_loop_asks_after_each_step_and_prints_the_note(monkeypatch, tmp_path, capsys):
    asked = []

    def note(self, batches, host_ms, device_ms, captured):
        asked.append((len(batches), host_ms > 0, device_ms, captured))
        return "note: said" if len(asked) == 2 else None

    monkeypatch.setattr(HostBound, "note", note)
    sizes = "--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16"
    steps_taken(f"{sizes} --seq-len 64 --device cpu".split(), tmp_path / "run", steps=3)
    assert asked == [(1, True, None, False)] * 3
    assert capsys.readouterr().out.count("note: said") == 1
