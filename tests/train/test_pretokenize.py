"""fla-cp-tokenize: the token files are those of the documents, by any number of processes."""

import json
import os

import numpy as np
import pytest

import fla_cp.train.pretokenize
from fla_cp.train.memmap import MemmapSource
from fla_cp.train.pretokenize import run, tokenize
from fla_cp.train.shards import Shards
from fla_cp.train.sources import Reading, build_dataset
from fla_cp.train.tokenizer import Tokenizer
from tests.support.checkpoints import disk_of
from tests.support.tokenizers import TEXT, save_tokenizer

pytest.importorskip("datasets")

FILES = ("tokens.bin", "tokens.json", "tokens.mask", "tokens.offsets")


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """A tokenizer and a file of conversations that makes several shards."""
    monkeypatch.setattr(fla_cp.train.pretokenize, "GROUP_BYTES", 2000)
    save_tokenizer(tmp_path / "tokenizer")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": f"{TEXT[i % len(TEXT)]} {i}"},
            ]
        }
        for i in range(150)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, [row["messages"] for row in rows]


def contents(folder):
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    return [(folder / name).read_bytes() for name in FILES]


def test_files_hold_all_documents_in_order(chat, tmp_path, capsys):
    path, talks = chat
    flags = [f"hf:{path}", "--tokenizer", str(tmp_path / "tokenizer")]
    for processes in (1, 2):
        out = str(tmp_path / f"out{processes}")
        assert run([*flags, "--out", out, "--processes", str(processes)]) == 0
        said = capsys.readouterr().out
        assert said.startswith("150 documents, ") and f"train with --data memmap:{out}" in said
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    assert not list(tmp_path.glob(".out*"))
    source = MemmapSource(tmp_path / "out1")
    names = [f"row {i}" for i in range(150)]
    encoded = Tokenizer(tmp_path / "tokenizer").encode("chat", talks, names)
    assert np.array_equal(source.read(0, len(source)), np.concatenate([e.tokens for e in encoded]))
    counted = np.concatenate([e.counted for e in encoded])
    assert np.array_equal(source.counted(0, len(source)), counted)
    ends = np.cumsum([len(e.tokens) for e in encoded])
    assert source.starts(0, len(source)).tolist() == ends.tolist()
    packs = build_dataset(
        f"memmap:{tmp_path / 'out1'}", 64, "train", 0, Reading(str(tmp_path / "tokenizer"))
    )
    labels = packs[0]["labels"]
    wanted = np.where(counted[1:65], source.read(1, 65), -100)
    assert labels.tolist() == wanted.tolist()


def test_texts_have_no_mask_and_an_end_token(tmp_path):
    tokenizer = Tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{TEXT[i]} {i}")
    out = tmp_path / "new" / "out"
    tokenize(f"text:{tmp_path / 'text'}", str(tokenizer.folder), out)
    source = MemmapSource(out)
    assert source.counted(0, 5) is None
    assert source.starts(0, len(source)).size == 10
    text = tokenizer.hf.decode(source.read(0, len(source)))
    assert text == "".join(f"{TEXT[i]} {i}<|end|>" for i in range(10))


def test_an_interruption_keeps_what_is_done_and_leaves_no_result(chat, tmp_path, monkeypatch):
    path, _ = chat
    out, made = tmp_path / "out", []
    write = Shards._write

    def interrupted(self, shard, path):
        if len(made) == 3:
            made.append(None)
            raise KeyboardInterrupt
        made.append(shard)
        write(self, shard, path)

    monkeypatch.setattr(Shards, "_write", interrupted)
    given = f"hf:{path}", str(tmp_path / "tokenizer"), out
    with pytest.raises(KeyboardInterrupt):
        tokenize(*given)
    assert not out.exists() and made == [0, 1, 2, None]
    tokenize(*given)
    assert made[4:] == list(range(3, 3 + len(made[4:]))) and len(made) > 5
    tokenize(*given[:2], tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("memmap:x --out {0}/o", "SOURCE must be stdlib, text:PATH or hf:PATH, got 'memmap:x'"),
        ("text:{0}/nothing --out {0}/o", "text: no file or folder at"),
        ("text:{0}/chat.jsonl --out {0}/tokenizer", "--out must not exist yet, got"),
        ("text:{0}/chat.jsonl --out {0}/o --processes 0", "--processes must be at least 1, got 0"),
        ("hf:{0}/chat.jsonl --out {0}/o --column x", "error: --column must be a column of"),
        ("hf:{0}/chat.jsonl --out {0}/o --tokenizer {0}/text", "--tokenizer: {0}/text must hold"),
        ("hf:{0}/chat.jsonl --out {0}/o --tokenizer {0}/x", "--tokenizer must be a folder, got"),
        ("text:{0}/text --out {0}/o --tokenizer {0}/text", "--tokenizer: {0}/text must hold"),
        ("hf:{0}/wrong.jsonl --out {0}/o", "must have a message of the role assistant"),
        ("text:{0}/nothing --out {0}/new/path/o", "text: no file or folder at"),
        ("hf:{0}/wrong.jsonl --out {0}/new/path", "must have a message of the role assistant"),
        ("text:{0}/text --out {0}/a/o", "--out must not be below a file, got {0}/a/o: {0}/a is"),
        ("text:{0}/text --out {0}/a/b/o", "--out must not be below a file, got {0}/a/b/o: {0}/a"),
    ],
)
def test_mistakes_end_in_one_line_and_leave_no_files(flags, message, chat, tmp_path, capsys):
    """The wrong documents are wrong only in their last shard, so that others are written."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT[0])
    (tmp_path / "a").write_text("a file")
    row = json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n"
    (tmp_path / "wrong.jsonl").write_text(chat[0].read_text() + row)
    before = sorted(tmp_path.rglob("*"))
    given = [word.format(tmp_path) for word in flags.split()]
    if "--tokenizer" not in flags:
        given += ["--tokenizer", str(tmp_path / "tokenizer")]
    assert run(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message.format(tmp_path) in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_second_command_is_refused_while_the_first_runs(texts, tmp_path, monkeypatch, capsys):
    out, make, codes = tmp_path / "new" / "out", fla_cp.train.pretokenize._make, []
    given = [*texts, "--out", str(out), "--processes", "1"]

    def interleaved(shards, processes):
        monkeypatch.setattr(fla_cp.train.pretokenize, "_make", make)
        codes.append(run(given))
        make(shards, processes)

    monkeypatch.setattr(fla_cp.train.pretokenize, "_make", interleaved)
    assert run(given) == 0
    assert codes == [2]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line[:6] == "error:"]
    assert line.startswith(
        f"error: --out must be written by one fla-cp-tokenize at a time, got {out}, which process "
        f"{os.getpid()} on host "
    )
    assert MemmapSource(out).starts(0, 1 << 20).size == 10
    assert list(out.parent.iterdir()) == [out]


def test_a_command_that_was_killed_holds_nothing(texts, tmp_path):
    """Its lock ended with it, and the file alone is none."""
    (tmp_path / ".out.lock").write_text('{"host": "h", "pid": 1, "since": "then"}')
    assert run([*texts, "--out", str(tmp_path / "out")]) == 0
    assert not list(tmp_path.glob(".out*"))


def test_a_command_that_ends_after_the_first_check_keeps_its_result(texts, tmp_path, monkeypatch):
    """The other command ends while this one loads the tokenizer."""
    out = tmp_path / "out"
    monkeypatch.setattr(Tokenizer, "hf", property(lambda self: out.mkdir()))
    assert run([*texts, "--out", str(out)]) == 2
    assert not list(out.iterdir()) and not list(tmp_path.glob(".out*"))


def test_a_mistake_keeps_what_an_interruption_left(chat, tmp_path):
    path, _ = chat
    parts = tmp_path / ".out.parts"
    parts.mkdir()
    with pytest.raises(ValueError, match="must be a column of"):
        tokenize(f"hf:{path}", str(tmp_path / "tokenizer"), tmp_path / "out", column="x")
    assert parts.exists()


@pytest.fixture
def texts(tmp_path):
    """Flags that read ten small texts."""
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{TEXT[i]} {i}")
    return [f"text:{tmp_path / 'text'}", "--tokenizer", str(tmp_path / "tokenizer")]


@pytest.mark.parametrize("count", [50, 100])
def test_a_full_disk_names_the_output_and_the_work_goes_on_later(count, texts, tmp_path, capsys):
    """50 bytes are too few for the offsets of a group, 100 for its sidecar or for its tokens."""
    out = tmp_path / "out"
    given = [*texts, "--out", str(out), "--processes", "1"]
    with disk_of(count):
        assert run(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --out: cannot write {out}: [Errno 27] File too large; what is")
    assert not out.exists()
    assert run(given) == 0
    assert MemmapSource(out).starts(0, 1 << 20).size == 10


def test_an_output_that_cannot_be_made_is_named(texts, capsys):
    """Nobody may make folders in /proc."""
    assert run([*texts, "--out", "/proc/out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --out: cannot write /proc/out: [Errno ")


def test_a_source_that_cannot_be_opened_is_named(texts, tmp_path, capsys):
    (tmp_path / "rows" / "a.jsonl").mkdir(parents=True)
    assert run([f"hf:{tmp_path / 'rows'}", *texts[1:], "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: SOURCE: cannot read hf:{tmp_path / 'rows'}: ")


def test_a_folder_among_a_tokenizers_files_is_left_out(texts, tmp_path):
    (tmp_path / "tokenizer" / "other.json").mkdir()
    assert run([*texts, "--out", str(tmp_path / "out")]) == 0


def _die():
    os._exit(9)


def test_a_process_that_dies_is_told_in_one_line(chat, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fla_cp.train.pretokenize, "_begin", _die)
    given = [f"hf:{chat[0]}", "--tokenizer", str(tmp_path / "tokenizer")]
    assert run([*given, "--out", str(tmp_path / "out"), "--processes", "2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a process that tokenises has died") and "got 2;" in line
