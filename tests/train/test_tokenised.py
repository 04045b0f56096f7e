"""Packs of documents that are tokenised while they are read: their order, a resume, shared work."""

import json
import shutil
import threading
from itertools import islice

import numpy as np
import pytest
import torch

import fla_cp.train.main
import fla_cp.train.tokenised
from fla_cp.train.loader import Sharing, StepLoader
from fla_cp.train.metrics import read_metrics
from fla_cp.train.shards import Shards
from fla_cp.train.sources import Reading, build_dataset
from fla_cp.train.tokenizer import Tokenizer
from tests.support.tokenizers import TEXT, save_tokenizer

pytest.importorskip("datasets")

T = 32
COUNT = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, text files, conversations and instructions."""
    root = tmp_path_factory.mktemp("data")
    save_tokenizer(root / "tokenizer")
    (root / "text").mkdir()
    talks, tasks = [], []
    for i in range(COUNT):
        said = " ".join(np.random.default_rng(i).choice(TEXT, 1 + i % 4).tolist())
        (root / "text" / f"{i}.txt").write_text(f"{i} {said}")
        roles = ("user", "assistant")
        contents = (f"{i} asks", said)
        talks.append([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
        tasks.append({"prompt": f"{i} asks", "completion": said})
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (root / "chat.jsonl").write_text(lines)
    (root / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return root


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """A dozen shards instead of one."""
    monkeypatch.setattr(fla_cp.train.tokenised, "SHARD_BYTES", 2000)
    monkeypatch.setattr(fla_cp.train.tokenised, "PACKS_A_SHARD", 1)


def dataset(folder, cache, spec="text:{}/text", split="train", seq_len=T, seed=0, limit=None):
    reading = Reading(str(folder / "tokenizer"), None, str(cache), limit)
    return build_dataset(spec.format(folder), seq_len, split, seed, reading)


def steps_of(data, workers, start=0, count=6, dp=2, dp_rank=0):
    sharing = Sharing(2, cp=2, cp_rank=1, layout="contiguous")
    sampler = data.sampler(8, 0, start)
    with StepLoader(data, sampler, sharing, dp=dp, dp_rank=dp_rank, workers=workers) as loader:
        return [[share.digest for share in step] for step in islice(loader, count)]


def epoch_of(data):
    """The packs of the first epoch."""
    data._find(0, 10**9)
    return [data[i] for i in range(data._ends[-1])]


def test_an_epoch_is_the_documents_but_for_the_ends_of_shards(folder, tmp_path):
    data = dataset(folder, tmp_path)
    shards, tokenizer = data.shards, data.shards.tokenizer
    assert len(shards) > 10
    packs = epoch_of(data)
    total = sum(shards.tokens(shard) for shard in range(len(shards)))
    assert total - T * len(shards) < len(packs) * T <= total
    text = [tokenizer.hf.decode(pack["tokens"]) for pack in packs]
    documents = shards.documents
    wanted = documents.read(range(len(documents)))[0]
    whole = [d for t in text for d in t.split("<|end|>")[1:-1]]
    assert len(whole) > 20 and set(whole) <= set(wanted)
    for pack in packs:
        assert pack["tokens"].shape == pack["labels"].shape == (T,)
        cu = pack["cu_seqlens"].tolist()
        ends = torch.tensor(cu[1:-1], dtype=torch.int64) - 1
        assert (pack["tokens"][ends] == tokenizer.end[0]).all()
        assert (pack["labels"][ends] == -100).all()
        inner = torch.ones(T - 1, dtype=torch.bool)
        inner[ends] = False
        assert torch.equal(pack["labels"][:-1][inner], pack["tokens"][1:][inner])


def test_each_epoch_has_the_same_packs_in_another_order(folder, tmp_path):
    data = dataset(folder, tmp_path)
    first = epoch_of(data)
    second = [data[len(first) + i] for i in range(len(first))]
    keys = [[bytes(pack["tokens"].numpy()) for pack in packs] for packs in (first, second)]
    assert sorted(keys[0]) == sorted(keys[1]) and keys[0] != keys[1]
    other = epoch_of(dataset(folder, tmp_path, seed=1))
    assert sorted(keys[0]) == sorted(bytes(pack["tokens"].numpy()) for pack in other)
    assert keys[0] != [bytes(pack["tokens"].numpy()) for pack in other]


def test_splits_share_no_document(folder, tmp_path):
    train, valid = (dataset(folder, tmp_path, split=s).shards.documents for s in ("train", "valid"))
    pieces = [{piece.path for piece in documents.pieces} for documents in (train, valid)]
    assert not pieces[0] & pieces[1] and len(pieces[0] | pieces[1]) == COUNT
    head = dataset(folder, tmp_path, split="valid").head(10_000)
    assert 1 <= len(head) < 100 and head[len(head) - 1]["tokens"].shape == (T,)
    assert len(dataset(folder, tmp_path).head(3)) == 3


@pytest.mark.parametrize("spec", ["hf:{}/chat.jsonl", "hf:{}/tasks.jsonl"])
def test_labels_are_what_the_assistant_says(spec, folder, tmp_path):
    data = dataset(folder, tmp_path, spec)
    hf = data.shards.tokenizer.hf
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    answers = {json.loads(line)["completion"] for line in lines}
    complete = 0
    for pack in epoch_of(data):
        counted = pack["labels"] != -100
        assert torch.equal(pack["labels"][:-1][counted[:-1]], pack["tokens"][1:][counted[:-1]])
        whole = hf.decode(pack["labels"][counted]).split("<|end|>")[1:-1]
        assert set(whole) <= answers
        complete += len(whole)
    assert complete > 20


def test_workers_a_resume_and_a_deleted_cache_change_nothing(folder, tmp_path):
    data = dataset(folder, tmp_path / "a")
    whole = [steps_of(data, 0, count=40, dp_rank=rank) for rank in range(2)]
    assert whole[0] != whole[1]
    packs = len(epoch_of(data))
    assert packs + 8 < 8 * 40  # over the end of an epoch
    shutil.rmtree(tmp_path / "a")
    assert steps_of(dataset(folder, tmp_path / "a"), 2, 37, 3, dp_rank=1) == whole[1][37:]
    assert steps_of(dataset(folder, tmp_path / "b"), 0, 5, 4) == whole[0][5:9]
    assert steps_of(dataset(folder, tmp_path / "a"), 0, 37, 3, dp=1) == [
        a + b for a, b in zip(whole[0][37:], whole[1][37:], strict=True)
    ]


def test_shards_are_made_once_and_ahead(folder, tmp_path, monkeypatch):
    made = []
    write = Shards._write

    def noted(self, shard, path):
        made.append((shard, threading.current_thread() is threading.main_thread()))
        write(self, shard, path)

    monkeypatch.setattr(Shards, "_write", noted)
    data = dataset(folder, tmp_path)
    assert len(made) == 1  # only what the first pack needs
    data[0]
    assert data._thread is not None
    data._thread.join()
    assert made[1] == (data._order[1], False)
    epoch_of(data)
    data._thread.join()
    epoch_of(dataset(folder, tmp_path))
    assert sorted(shard for shard, _ in made) == list(range(len(data.shards)))
    assert not list(data.shards.folder.glob("*.lock")) + list(data.shards.folder.glob(".*"))


def test_a_small_cache_gives_the_same_packs(folder, tmp_path):
    """Shards come and go while they are read, also those of other data."""
    every = dataset(folder, tmp_path / "a")
    wanted = epoch_of(every)
    sizes = [sum(f.stat().st_size for f in p.iterdir()) for p in every.shards.folder.glob("0*")]
    dataset(folder, tmp_path / "b", split="valid")[0]
    small = dataset(folder, tmp_path / "b", limit=3 * max(sizes))
    small.ahead = False  # a thread would still be making a shard at the end
    for a, b in zip(wanted, epoch_of(small), strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
    left = list((tmp_path / "b" / "tokens").glob("*/0*"))
    assert sum(f.stat().st_size for p in left for f in p.iterdir()) <= 3 * max(sizes)
    assert small.shards.folder in {path.parent for path in left}
    assert len(left) < len(sizes)


def test_a_shard_that_is_deleted_before_it_is_read_is_made_again(folder, tmp_path, monkeypatch):
    shards, made = dataset(folder, tmp_path / "a").shards, []
    original = Shards.make

    def deleted(self, shard):
        path = original(self, shard)
        made.append(path)
        if len(made) == 1:
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(Shards, "make", deleted)
    assert len(shards.source(0)) and len(made) == 2


def test_threads_that_need_one_shard_make_it_once(folder, tmp_path, monkeypatch):
    data = dataset(folder, tmp_path)
    shards = Shards(data.shards.documents, Tokenizer(folder / "tokenizer"), tmp_path / "b", 10**6)
    encode, calls = Tokenizer.encode, []
    monkeypatch.setattr(Tokenizer, "encode", lambda *a: calls.append(1) or encode(*a))
    threads = [threading.Thread(target=shards.make, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shards) == len(calls) == 1 and shards.tokens(0) > 1000


def test_too_little_text_and_missing_tokenizers_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"split of 'text:.*' has \d+ tokens, fewer than one pack"):
        dataset(folder, tmp_path, seq_len=100_000)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        dataset(folder, tmp_path, seq_len=0)
    with pytest.raises(ValueError, match=r"'hf:.*' needs --tokenizer, the folder of a tokenizer"):
        build_dataset(f"hf:{tmp_path}", T, "train", 0)
    with pytest.raises(
        ValueError, match="'synthetic' must have the vocabulary of --tokenizer, 284"
    ):
        dataset(folder, tmp_path, "synthetic")


FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2"),
    *("--model.head-dim", "16", "--device", "cpu", "--seq-len", "32", "--max-steps", "4"),
    *("--global-batch-size", "4", "--eval-every", "2", "--checkpoint-every", "2"),
    *("--warmup-steps", "1", "--lr", "0.01", "--tracker", "none"),
]


def test_a_run_that_resumes_has_the_losses_of_one_that_did_not(folder, tmp_path, capsys):
    """On a mixture of text and conversations, whose tokens are deleted in between."""
    spec = f"text:{folder}/text:0.5,hf:{folder}/chat.jsonl:1.5"
    flags = [*FLAGS, "--data", spec, "--tokenizer", str(folder / "tokenizer")]
    flags += ["--data.cache", str(tmp_path / "cache")]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert fla_cp.train.main.main([*flags, "--out", str(whole)]) == 0
    shutil.rmtree(tmp_path / "cache")
    resumed = ["--resume", str(whole / "checkpoints" / "step-00000002"), "--out", str(again)]
    assert fla_cp.train.main.main([*flags, *resumed]) == 0
    expected = [(row["step"], row["loss"], row["eval_loss"]) for row in read_metrics(whole)]
    found = [(row["step"], row["loss"], row["eval_loss"]) for row in read_metrics(again)]
    assert found[-2:] == expected[-2:] and found[-1][0] == 4
    out = capsys.readouterr().out
    assert "in packs of 32 tokens, vocabulary 284" in out
    assert "the resumed run's data differ" not in out


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_row_that_is_found_bad_in_the_run_ends_it_in_one_line(workers, folder, tmp_path, capsys):
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    lines[222] = json.dumps({"prompt": "222 asks", "completion": None})
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    flags = [*FLAGS, "--max-steps", "99", "--eval-every", "0", "--workers", workers]
    flags += ["--data", f"hf:{tmp_path}/tasks.jsonl", "--tokenizer", str(folder / "tokenizer")]
    flags += ["--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    assert fla_cp.train.main.main(flags) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert error.startswith(
        f"error: --data: {tmp_path}/tasks.jsonl: prompt and completion of row 222 must be a prompt"
    )
    assert len(read_metrics(tmp_path / "run")) > 1


@pytest.mark.parametrize("source", ["text:{}/text", "hf:{}/chat.jsonl"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_cache_that_cannot_be_made_is_named(source, missing, folder, tmp_path, capsys):
    """Nobody may make folders in /proc, or below a file."""
    (tmp_path / "file").touch()
    cache = "/proc/none/cache" if missing else str(tmp_path / "file")
    flags = [*FLAGS, "--data", source.format(folder), "--tokenizer", str(folder / "tokenizer")]
    flags += ["--data.cache", cache, "--out", str(tmp_path / "run")]
    assert fla_cp.train.main.main(flags) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    reason = "No such file or directory" if missing else "Not a directory"
    said = "must be a folder that can be made and written"
    assert error == f"error: --data.cache {said}, got {cache}: {reason}"
    reading = Reading(str(folder / "tokenizer"), cache=cache, cache_flag="--cache")
    with pytest.raises(ValueError, match=f"^--cache {said}, got {cache}"):
        build_dataset(source.format(folder), T, "valid", 0, reading)
