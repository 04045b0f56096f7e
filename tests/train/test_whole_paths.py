"""Runs whose data and tokenizer were named by relative paths are used from any folder."""

import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets

import fla_cp.train.checkpoint
import fla_cp.train.evaluate
import fla_cp.train.export
import fla_cp.train.generate
import fla_cp.train.main
import fla_cp.train.run_folder
from fla_cp.train.checkpoint import checkpoints, read_record
from fla_cp.train.config import DataConfig
from fla_cp.train.parse import load_toml
from fla_cp.train.whole_paths import with_whole_paths
from tests.support.tokenizers import TEXT, save_tokenizer

FLAGS = [
    *("--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2", "--impl"),
    *("torch", "--model.head-dim", "16", "--device", "cpu", "--seq-len", "64", "--tracker", "none"),
    *("--model.pattern", "gdn", "--global-batch-size", "1", "--eval-every", "0", "--tokenizer"),
    *("words", "--data.cache", "cache", "--out", "run"),
]
DATA = "text:./long.txt:0.75,hf:rows.jsonl:.25"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder in which a run is started, with a text, rows and a tokenizer."""
    folder = tmp_path / "home"
    folder.mkdir()
    save_tokenizer(folder / "words")
    (folder / "long.txt").write_text("\n".join(TEXT * 60))
    datasets.Dataset.from_dict({"text": TEXT * 60}).to_json(str(folder / "rows.jsonl"))
    monkeypatch.chdir(folder)
    return folder


def train(steps, *flags):
    return fla_cp.train.main.main([*FLAGS, "--data", DATA, "--max-steps", str(steps), *flags])


@pytest.mark.parametrize(
    "source, stored",
    [
        ("stdlib", "stdlib"),
        ("needle:12", "needle:12"),
        ("text:a/./b", "text:HOME/a/b"),
        ("memmap:../x,y:2", "memmap:HOME/../x,y:2"),  # a link may be above ..
        ("hf:/data/rows", "hf:/data/rows"),
        ("text:a:0.70,stdlib:.3", "text:HOME/a:0.70,stdlib:.3"),
        ("memmap:a,b:1,hf:c:d:2.", "memmap:HOME/a,b:1,hf:HOME/c:d:2."),
    ],
)
def test_paths_are_whole_and_weights_stay(source, stored, home):
    stored = stored.replace("HOME", str(home))
    found = with_whole_paths(DataConfig(source=source, tokenizer="words"))
    assert found == DataConfig(source=stored, tokenizer=f"{home}/words")
    assert with_whole_paths(found) == found
    assert with_whole_paths(DataConfig()) == DataConfig()


def test_a_run_is_used_from_another_folder(home, tmp_path, monkeypatch, capsys):
    assert train(2) == 0
    assert "data text:./long.txt:0.75,hf:rows.jsonl:.25: " in capsys.readouterr().out
    record, _ = read_record(checkpoints(home / "run")[-1])
    config = load_toml(home / "run/config.toml")
    for data in (record["data"], vars(config.data)):
        assert data["source"] == f"text:{home}/long.txt:0.75,hf:{home}/rows.jsonl:.25"
        assert data["tokenizer"] == f"{home}/words"
    there = tmp_path / "there"
    there.mkdir()
    save_tokenizer(there / "words", merges=3)  # another one, of the same name
    monkeypatch.chdir(there)
    run, cpu = str(home / "run"), ["--device", "cpu"]
    assert fla_cp.train.generate.main([run, *cpu, "--prompt", "The red"]) == 0
    assert fla_cp.train.evaluate.main([run, *cpu, "--packs", "2", "--cache", "cache"]) == 0
    assert fla_cp.train.export.main([run, "out"]) == 0
    written, own = (folder / "tokenizer.json" for folder in (there / "out", home / "words"))
    assert written.read_text() == own.read_text()
    capsys.readouterr()
    flags = ["--config", f"{run}/config.toml", "--resume", run, "--max-steps", "3"]
    assert fla_cp.train.main.main(flags) == 0
    assert "the resumed run's data differ" not in capsys.readouterr().out


def test_records_of_older_versions_are_read(home, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        for module in (fla_cp.train.checkpoint, fla_cp.train.run_folder):
            patch.setattr(module, "with_whole_paths", lambda data: data)
        assert train(1) == 0
    record, _ = read_record(checkpoints(home / "run")[-1])
    assert (record["data"]["source"], record["data"]["tokenizer"]) == (DATA, "words")
    assert fla_cp.train.generate.main(["run", "--device", "cpu", "--prompt", "The red"]) == 0
    assert train(2, "--resume", "auto") == 0
    assert "the resumed run's data differ" not in capsys.readouterr().out
    shutil.copytree("words", "others")
    assert train(3, "--resume", "auto", "--tokenizer", "others") == 0
    note = f"data differ: --data.tokenizer is {home}/others, was {home}/words"
    assert note in capsys.readouterr().out
