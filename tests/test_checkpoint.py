"""Checkpoints: whole or absent, what they hold, and what `--resume` finds."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from launch import checkpoint
from launch.checkpoint import Progress, checkpoints, complete, find
from launch.config import UserError, parse
from launch.distributed import joined, shard_model
from launch.model import build_model
from launch.step import build_optimizer

FLAGS = (
    "--device cpu --model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 "
    "--run.keep-checkpoints 2"
)
VOCAB = 64


class OneRank:
    """A model of one rank with its optimiser, on a world of one."""

    def __init__(self, ranks, flags="", seed=0):
        self.config = parse(f"{FLAGS} {flags}".split())
        self.ranks = ranks
        self.model = build_model(self.config.model, VOCAB, seed)
        shard_model(self.model, ranks, torch.float32)
        self.optimizer = build_optimizer(self.model, self.config.optim)

    def update(self):
        for p in self.model.parameters():
            p.grad = p.detach().cos()
        self.optimizer.step()

    def save(self, run, step, skipped=0):
        progress = Progress(step, skipped)
        return checkpoint.save(
            run, self.config, VOCAB, self.model, self.optimizer, progress, self.ranks
        )

    def load(self, path):
        return checkpoint.load(path, self.model, self.optimizer, self.ranks)

    def tensors(self):
        """Parameters and moments by name."""
        found = {}
        for name, p in self.model.named_parameters():
            found[name] = p.full_tensor().clone()
            for key, value in self.optimizer.state[p].items():
                found[f"{name}.{key}"] = getattr(value, "full_tensor", lambda v=value: v)().clone()
        return found


@pytest.fixture
def ranks():
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks


def names(run):
    return sorted(f.name for f in (run / "checkpoints").iterdir())


def test_load_restores_weights_moments_progress_and_generators(tmp_path, ranks):
    first, second = OneRank(ranks), OneRank(ranks, "--lr 0.5 --optim.beta2 0.5", seed=1)
    first.update()
    path = first.save(tmp_path, 7, skipped=2)
    assert path == tmp_path / "checkpoints" / "step-00000007"
    drawn = torch.rand(3)
    first_tensors = first.tensors()

    assert second.load(path) == Progress(step=7, skipped=2)
    torch.testing.assert_close(second.tensors(), first_tensors, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), drawn)
    # what the flags say now wins over what they said then
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    assert second.optimizer.param_groups[0]["betas"] == (0.9, 0.5)
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.1, 0.0]


def test_newest_are_kept_and_found(tmp_path, ranks):
    one = OneRank(ranks)
    assert find("auto", tmp_path) is None
    one.update()
    for step in (2, 10, 100):
        one.save(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert find("none", tmp_path) is None
    newest = tmp_path / "checkpoints" / "step-00000100"
    assert find("auto", tmp_path) == newest
    assert find(str(tmp_path), tmp_path / "other") == newest
    older = newest.with_name("step-00000010")
    assert find(str(older), tmp_path) == older
    with pytest.raises(UserError, match=r"--resume must be none, auto, or the path .* no complete"):
        find(str(tmp_path / "other"), tmp_path)


def test_crash_while_writing_leaves_the_last_good_one(tmp_path, ranks, monkeypatch):
    one = OneRank(ranks)
    one.update()
    good = one.save(tmp_path, 5)

    def crash(state, *, checkpoint_id, **kwargs):
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", crash)
        with pytest.raises(OSError, match="disk full"):
            one.save(tmp_path, 6)
    assert names(tmp_path) == [".partial-step-00000006", "step-00000005"]
    assert find("auto", tmp_path) == good
    one.load(good)
    one.save(tmp_path, 7)
    assert names(tmp_path) == ["step-00000005", "step-00000007"]


@pytest.mark.parametrize("missing", [".metadata", "trainer.json"])
def test_folder_without_its_last_files_does_not_count(tmp_path, missing):
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    for name in (".metadata", "trainer.json"):
        (folder / name).write_text("{}")
    assert complete(folder)
    (folder / missing).unlink()
    assert not complete(folder)
    assert checkpoints(tmp_path) == []


def test_writing_a_step_again_replaces_it(tmp_path, ranks):
    one = OneRank(ranks)
    one.update()
    one.save(tmp_path, 5)
    one.update()
    path = one.save(tmp_path, 5, skipped=1)
    tensors = one.tensors()
    assert names(tmp_path) == ["step-00000005"]
    other = OneRank(ranks, seed=1)
    assert other.load(path).skipped == 1
    torch.testing.assert_close(other.tensors(), tensors, rtol=0, atol=0)


def test_clean_drops_later_steps(tmp_path, ranks):
    one = OneRank(ranks)
    one.update()
    for step in (5, 10):
        one.save(tmp_path, step)
    assert [f.name for f in checkpoint.clean(tmp_path, after=5)] == ["step-00000010"]
    assert names(tmp_path) == ["step-00000005"]


def test_another_model_is_refused_and_other_data_noted(tmp_path, ranks):
    one = OneRank(ranks)
    path = one.save(tmp_path, 1)
    assert checkpoint.check_matches(path, one.config, VOCAB) == []
    other = parse(f"{FLAGS} --seq-len 128 --seed 3".split())
    assert checkpoint.check_matches(path, other, VOCAB) == [
        "seq_len is 128, was 4096",
        "seed is 3, was 0",
    ]
    with pytest.raises(UserError, match="was trained with layers=1, but this run has layers=2"):
        checkpoint.check_matches(path, parse(["--model.layers", "2"]), VOCAB)
    with pytest.raises(UserError, match="vocab_size=64, but this run has vocab_size=65"):
        checkpoint.check_matches(path, one.config, VOCAB + 1)
    facts = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**facts, "format": 0}))
    with pytest.raises(UserError, match="has format 0, expected 1"):
        checkpoint.check_matches(path, one.config, VOCAB)
