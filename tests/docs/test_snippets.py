"""Every command and program in the pages of docs/ runs, or is run dry."""

import re

import pytest

from tests.support.processes import ROOT
from tests.support.snippets import blocks, commands, run, run_dry

BLOCKS = [b for path in sorted((ROOT / "docs").glob("*.md")) for b in blocks(path)]
BASH = [b for b in BLOCKS if b.language == "bash"]
PYTHON = [b for b in BLOCKS if b.language == "python"]

ELSEWHERE = {
    "accelerate.md": "tests/integrations/test_launched.py",
    "convolution.md": "tests/docs/test_docs.py",
    "cuda_graphs.md": "tests/multi_gpu",
    "export.md": "tests/train/test_export.py",
    "transformers.md": "tests/integrations",
}
"""Pages whose programs need a model, several ranks or a GPU beside them, and the tests that run the
same calls. Here their names are looked up."""

HERE = [b for b in PYTHON if b.page not in ELSEWHERE]


def ids(found):
    return [b.name for b in found]


def test_each_block_says_what_it_is():
    assert {b.language for b in BLOCKS} == {"bash", "python"}
    assert len(BASH) > 15 and len(PYTHON) > 8
    assert all((ROOT / where).exists() for where in ELSEWHERE.values())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model of transformers for the pages' DIR."""
    pytest.importorskip("transformers", minversion="5.23")
    from tests.support.stock_folders import save_stock

    return save_stock(tmp_path_factory.mktemp("models") / "DIR", "qwen3_next")


@pytest.mark.parametrize("block", BASH, ids=ids(BASH))
def test_commands_are_right(block, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands(block.code):
        there = [re.sub(r"\bhf:DIR\b", f"hf:{model_folder}", word) for word in words]
        run_dry(there, tmp_path)


@pytest.mark.parametrize(
    "command, reason",
    [
        ("fla-cp-train --cpp 2", "--cpp"),
        ("fla-cp-train --seq-len 0", "--seq-len must be at least 1"),
        ("make train ARGS='--seq-len 0'", "--seq-len must be at least 1"),
        ("torchrun --nproc-per-node 4 launch/train.py --cp 3", "4 ranks are started, 3 are"),
        ("torchrun --nproc-per-node 4 launch/trian.py", "launch/trian.py"),
        ("torchrun --nproc-per-nodes 4 launch/train.py", "--nproc-per-nodes"),
        ("torchrun examples/transformers_hybrid.py --tokenz 5", "--tokenz"),
        ("accelerate launch --fsdp_version 2 examples/none.py", "examples/none.py"),
        ("sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --cp 4 --dp-shard 2", "16 ranks are"),
        ("sbatch --nodes 2 --gpus 8 launch/slurm.sh --cp 8", "--gpus-per-node"),
        ("fla-cp-export run out --dtype float7", "float7"),
        ("fla-cp-tokenize text:a --tokenizer c --out b --no-such-flag", "--no-such-flag"),
        ("python -m benchmarks.train --modells 340M", "--modells"),
        ("python -m benchmarks.trains", "benchmarks.trains"),
        ("make tests", "tests"),
        ("pip install 'fla_cp[trian]'", "trian"),
        ("curl web", "nothing is known about curl"),
    ],
)
def test_wrong_commands_are_found(command, reason, tmp_path, capsys):
    (words,) = commands(command)
    with pytest.raises((AssertionError, SystemExit, ValueError)) as refused:
        run_dry(words, tmp_path)
    shown = capsys.readouterr()
    assert reason in f"{refused.value}{shown.out}{shown.err}"


@pytest.mark.wide
@pytest.mark.parametrize("block", [b for b in BASH if b.words is not None], ids=lambda b: b.name)
def test_commands_run(block, tmp_path):
    for words in commands(block.code):
        run([*words, *block.words], tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("block", HERE, ids=ids(HERE))
def test_programs_run(block, tmp_path):
    (tmp_path / "script.py").write_text(block.code)
    given = dict(word.split("=") for word in block.words or ())
    ranks = int(given.get("ranks", 1))
    if ranks == 1:
        run(["python", "script.py"], tmp_path)
        return
    shown = run(["torchrun", "--nproc-per-node", str(ranks), "script.py"], tmp_path)
    lines = re.findall(r"rank (\d): (\d+) tokens(?:, gradient norm ([\d.]+))?", shown)
    assert sorted(rank for rank, *_ in lines) == [str(n) for n in range(ranks)]
    assert sum(int(tokens) for _, tokens, _ in lines) == 300
    assert len({norm for *_, norm in lines}) == 1
    if lines[0][2]:
        ((_, tokens, norm),) = re.findall(
            r"rank (\d): (\d+) tokens, gradient norm ([\d.]+)",
            run(["python", "script.py"], tmp_path),
        )
        assert tokens == "300" and float(norm) == pytest.approx(float(lines[0][2]), rel=1e-3)


@pytest.mark.parametrize("block", [b for b in PYTHON if b not in HERE], ids=lambda b: b.name)
def test_programs_of_other_tests_import_what_exists(block):
    tree = compile(block.code, block.name, "exec", flags=0)
    assert tree is not None
    for line in re.findall(r"^from fla_cp\S* import .*$|^import .*$", block.code, flags=re.M):
        exec(line, {})
