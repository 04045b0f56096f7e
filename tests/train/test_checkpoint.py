"""Checkpoints: complete or absent, their contents, and what `--resume` finds."""

import dataclasses
from pathlib import Path

import pytest
import torch

from fla_cp.train import checkpoint
from fla_cp.train.checkpoint import Progress, checkpoints, complete, find
from fla_cp.train.config import DataConfig, ModelConfig, UserError
from fla_cp.train.integrity import seal
from tests.support.checkpoints import VOCAB, OneRank, names


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
    # the flags of now win over those of the checkpoint
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    assert second.optimizer.param_groups[0]["betas"] == (0.9, 0.5)
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.1, 0.0]


def test_newest_are_kept_and_found(tmp_path, ranks):
    one = OneRank(ranks)
    assert find("auto", tmp_path) == []
    one.update()
    for step in (2, 10, 100):
        one.save(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert find("none", tmp_path) == []
    newest = tmp_path / "checkpoints" / "step-00000100"
    older = newest.with_name("step-00000010")
    assert find("auto", tmp_path) == [newest, older]
    assert find(str(tmp_path), tmp_path / "other") == [newest, older]
    assert find(str(older), tmp_path) == [older]
    with pytest.raises(UserError, match=r"--resume must be none, .* does not exist"):
        find(str(tmp_path / "other"), tmp_path)


def test_crash_while_writing_leaves_the_last_good_one(tmp_path, ranks, monkeypatch):
    one = OneRank(ranks)
    one.update()
    good = one.save(tmp_path, 5)

    class PowerCut(BaseException):
        pass

    def crash(path, new):
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(BaseException, match="PowerCut"):
            one.save(tmp_path, 6)
    assert find("auto", tmp_path) == [good]
    one.load(good)
    one.save(tmp_path, 7)
    assert names(tmp_path)[-2:] == ["step-00000005", "step-00000007"]


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
    later = tmp_path / "checkpoints" / "step-00000010"
    assert checkpoint.clean(tmp_path, after=5) == [f"removed {later}: later than the resumed step"]
    assert names(tmp_path) == ["step-00000005"]


def test_every_option_of_the_model_counts_unless_named(ranks):
    one = OneRank(ranks)

    @dataclasses.dataclass(frozen=True)
    class Grown(ModelConfig):
        dropout: float = 0.5

    grown = dataclasses.replace(one.config, model=Grown(**dataclasses.asdict(one.config.model)))
    assert checkpoint.facts(grown, VOCAB, 10, torch.float32)["model"]["dropout"] == 0.5
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert names - one.facts()["model"].keys() == set(checkpoint.MODEL_NEUTRAL)
    names = {field.name for field in dataclasses.fields(DataConfig)}
    assert names - one.facts()["data"].keys() == set(checkpoint.DATA_NEUTRAL)


def test_another_model_is_refused_and_other_data_noted(tmp_path, ranks):
    one = OneRank(ranks)
    path = one.save(tmp_path, 1)
    assert checkpoint.check_matches(path, one.facts()) == []
    neutral = OneRank(ranks, "--impl torch --remat selective --model.offload")
    assert checkpoint.check_matches(path, neutral.facts()) == []
    said = OneRank(ranks, "--model.gate-bias True")  # which it has anyway
    assert checkpoint.check_matches(path, said.facts()) == []
    with pytest.raises(UserError, match=r"no --model.gate-bias, but .* --model.gate-bias False"):
        checkpoint.check_matches(path, OneRank(ranks, "--model.gate-bias False").facts())
    other = OneRank(ranks, "--seq-len 128 --seed 3")
    assert checkpoint.check_matches(path, other.facts(packs=9)) == [
        "the resumed run's data differ: --data.seq-len is 128, was 4096",
        "the resumed run's data differ: --seed is 3, was 0",
        "the resumed run's data differ: packs in --data is 9, was 10",
    ]


def test_another_schedule_is_noted_with_its_learning_rate(tmp_path, ranks):
    flags = "--max-steps 20 --lr 0.004 --warmup-steps 2"
    one = OneRank(ranks, flags)
    path = one.save(tmp_path, 20)
    assert checkpoint.check_matches(path, one.facts()) == []
    longer = OneRank(ranks, flags.replace("20", "40", 1))
    assert checkpoint.check_matches(path, longer.facts()) == [
        "the resumed run's schedule differs: --max-steps is 40, was 20; the learning rate of step "
        "20 was 4.0e-04, that of step 21 is 2.2e-03"
    ]
    other = OneRank(ranks, "--max-steps 40 --lr 0.002 --schedule wsd --optim.decay-ratio 0.5")
    assert checkpoint.check_matches(path, other.facts()) == [
        "the resumed run's schedule differs: --max-steps is 40, was 20; --schedule is wsd, was "
        "cosine; --optim.decay-ratio is 0.5, was 0.2; --lr is 0.002, was 0.004; --warmup-steps is "
        "8, was 2; the learning rate of step 20 was 4.0e-04, that of step 21 is 1.9e-03"
    ]
    del (record := checkpoint.read_record(path)[0])["optim"]  # as older versions wrote it
    (path / checkpoint.RECORD).write_bytes(seal(record))
    assert checkpoint.check_matches(path, longer.facts()) == []


def test_a_hybrid_is_resumed_with_other_positions_and_no_other_pattern(tmp_path, ranks):
    hybrid = "--model.pattern kda,attention"
    one = OneRank(ranks, hybrid)
    path = one.save(tmp_path, 1)
    stretched = OneRank(ranks, hybrid + " --model.rope-theta 5e5 --model.rope-scaling yarn:4:1024")
    assert checkpoint.check_matches(path, stretched.facts()) == [
        "rotary positions differ: --model.rope-theta 500000.0, before --model.rope-theta 10000.0",
        "rotary positions differ: --model.rope-scaling yarn:4:1024, before no --model.rope-scaling",
    ]
    with pytest.raises(UserError, match=r"--model.pattern kda,attention, but .* gdn,attention"):
        checkpoint.check_matches(path, OneRank(ranks, "--model.pattern gdn,attention").facts())
