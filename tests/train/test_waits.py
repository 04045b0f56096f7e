"""How often the host waits for the device in a step: once, to read the loss and the norm.

On the CPU nothing waits, so these tests count the calls that would wait on a GPU.
tests/multi_gpu/test_waits.py asks CUDA itself.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fla_cp.train.step
from fla_cp.train.parse import parse
from tests.support.loops import training_loop

READS = ("item", "tolist", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__")
# These read tensors that are on the host by design: batches, tables, collectives over gloo.
HOST_FILES = ("packing.py", "checks.py", "data.py", "loader.py")
HOST = [
    *(("distributed.py", "host_rows"), ("context.py", "_read")),
    *(("step.py", "agree"), ("step.py", "document_lengths")),
]


def caller():
    """File and function of the innermost call outside of torch and of this file's modes."""
    frame = sys._getframe(1)
    while "site-packages" in (name := frame.f_code.co_filename) or frame.f_code.co_name in (
        "__torch_function__",
        "__torch_dispatch__",
    ):
        frame = frame.f_back
    return Path(name).name, frame.f_code.co_name


class Reads(TorchFunctionMode):
    """Notes the caller of each function that brings a tensor's values to Python."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS:
            self.places.append(caller())
        return func(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Notes the same for the operator below item(), int(), float() and bool(), however called."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item):
            self.places.append(caller())
        return func(*args, **(kwargs or {}))


def of_device(mode):
    """The places where a tensor may be on the device."""
    return [p for p in mode.places if p[0] not in HOST_FILES and p not in HOST]


@pytest.mark.parametrize(
    "flags",
    [
        *("", "--optimizer muon --schedule wsd", "--micro-batch-size 1"),
        "--model.experts 4 --model.routing sigmoid --model.aux-loss 0.1",
    ],
)
def test_a_step_reads_from_the_device_once(ranks, tmp_path, flags):
    config = parse(
        f"--device cpu --data synthetic --seq-len 60 --eval-every 0 --clip-norm 0.01 --max-steps 9 "
        f"--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 {flags} "
        f"--out {tmp_path / 'run'}".split()
    )
    with training_loop(config, ranks) as (loop, feed):
        loop._step(feed, [])  # a first step compares contexts and makes states
        with Reads() as reads, Scalars() as scalars:
            loop._step(feed, [])
        assert loop.progress.step == 2 and loop.skips.count == 0
    assert of_device(reads) == [("step.py", "read")]
    assert of_device(scalars) == []


def test_the_counters_see_a_read(ranks, tmp_path, monkeypatch):
    """The test above fails if a step reads once more."""
    original = fla_cp.train.step.update_ahead

    def reading(optimizer, *args):
        optimizer.param_groups[0]["params"][0].to_local().sum().item()
        return original(optimizer, *args)

    monkeypatch.setattr(fla_cp.train.step, "update_ahead", reading)
    config = parse(
        f"--device cpu --data synthetic --seq-len 60 --eval-every 0 --max-steps 9 "
        f"--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 "
        f"--out {tmp_path / 'run'}".split()
    )
    with training_loop(config, ranks) as (loop, feed), Reads() as reads, Scalars() as scalars:
        loop._step(feed, [])
    assert of_device(reads) == [("test_waits.py", "reading"), ("step.py", "read")]
    assert of_device(scalars) == [("test_waits.py", "reading")]
