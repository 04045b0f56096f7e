"""Training steps through CUDA graphs equal steps without them, also after an evaluation."""

import json
import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, environment


def run_and_expect(command: list[str], printed: str, timeout: float) -> None:
    """Runs a command whose kernels are compiled, not interpreted. It has to succeed and to print
    `printed`."""
    done = subprocess.run(
        command,
        env=environment(TRITON_INTERPRET="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout


EXPERTS = "--model.experts 8 --model.experts-per-token 2 --model.shared-experts 1"
AUTO = "--cuda-graphs auto --dtype bfloat16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "flags",
    [
        f"{AUTO} --model.pattern kda,mla --seq-len 4096 --compile off",
        f"{AUTO} --model.pattern kda,mla --seq-len 4096 --compile on",
        f"{AUTO} --model.pattern gdn,attention {EXPERTS} --compile off",
        f"{AUTO} --model.pattern gdn,attention {EXPERTS} --compile on",
        *("--data.max-documents=16", "--compile off", "--compile on"),
        "--data.max-documents=16 --dtype bfloat16 --model.pattern kda,attention",
        "--data.max-documents=16 --dtype bfloat16 --model.pattern kda,mla --model.mla-rope",
    ],
    ids=lambda x: x[2:],
)
def test_steps_through_graphs(flags):
    command = [sys.executable, "-m", "tests.support.graphs", *flags.split()]
    run_and_expect(command, "equal steps", timeout=900)


def trained(folder, cp, *flags):
    """Losses and gradient norms of a run on `cp` GPUs, whose packs are one document each."""
    sizes = ["--model.layers", "2", "--model.hidden-size", "128", "--model.num-heads", "2"]
    data = ["--data", f"text:{folder / 'long.txt'}", "--seq-len", "512", "--max-steps", "9"]
    out = folder / "-".join(flags)
    rest = ["--global-batch-size", "1", "--eval-every", "4", "--cp", cp, "--dtype", "float32"]
    command = [sys.executable, "launch/train.py", *sizes, *data, *rest, *flags, "--out", str(out)]
    done = subprocess.run(
        command,
        env=environment(TRITON_INTERPRET="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = out.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(r["loss"], r["grad_norm"]) for r in rows if r["loss"] is not None]


@pytest.mark.parametrize("cp, graphs", [(2, "auto"), (4, "on")])
@pytest.mark.parametrize("flags", [("--compile", "off"), ("--compile", "on")], ids=" ".join)
def test_ranks_through_graphs(flags, cp, graphs, tmp_path):
    """They also end: NCCL ends no group while a graph has its messages."""
    if torch.cuda.device_count() < cp:
        pytest.skip(f"needs {cp} GPUs")
    (tmp_path / "long.txt").write_text("one long document " * 2000)
    plain = trained(tmp_path, str(cp), "--cuda-graphs", "off", *flags)
    found = trained(tmp_path, str(cp), "--cuda-graphs", graphs, *flags)
    assert len(found) == len(plain) > 2
    for mine, theirs in zip(found, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "flags",
    [
        *("--compile off", "--compile on", "--compile off --exchange all_gather"),
        "--global-batch-size 2 --micro-batch-size 1 --parallel.reduce micro_batch",
    ],
)
def test_waits_inside_graphs_are_measured(flags, tmp_path):
    (tmp_path / "long.txt").write_text("one long document " * 4000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.graph_waits", "--data", f"text:{tmp_path / 'long.txt'}"]
    command += [*flags.split(), "--out", str(tmp_path / "run")]
    run_and_expect(command, "waits in graphs are measured", timeout=600)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_of_a_graph_add_their_times():
    """In a process of its own, since Triton is set to its interpreter in this one."""
    command = [sys.executable, "-m", "tests.support.graph_replays"]
    run_and_expect(command, "replays add their times", timeout=300)
