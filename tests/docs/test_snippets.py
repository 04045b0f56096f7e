"""Every command and program in the pages of docs/ runs, or is run dry."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch

from fla_cp import build_cp_context
from tests.support.processes import ROOT, environment
from tests.support.snippets import (
    DRY,
    ENTRY,
    PACKAGES,
    as_clone,
    blocks,
    commands,
    inline_commands,
    run,
    run_dry,
    shortened,
    why_dry,
)

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCKS = [b for path in PAGES for b in blocks(path)]
BASH = [b for b in BLOCKS if b.language == "bash"]
PYTHON = [b for b in BLOCKS if b.language == "python" and b.page != "README.md"]
"""README's program is run in tests/docs/test_docs.py."""

SHORT = ["--seq-len", "64", "--max-steps", "2", "--eval-every", "0"]
"""Words for the commands of README, which has no lines to spare for its own."""

FOUR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
PUBLISHED = {
    "Kimi-Linear-48B-A3B-Base": (
        "kimi_linear",
        {
            **FOUR,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "intermediate_size": 128,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "vocab_size": 163840,
        },
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        "qwen3_next",
        {**FOUR, "num_key_value_heads": 1, "shared_expert_intermediate_size": 16}
        | {"vocab_size": 151936},
    ),
}
"""Folders of published models that pages name, and what makes them small here: kind and sizes."""

GPU_ONLY = "cuda_graphs.md"
"""Its program captures a CUDA graph, which needs a GPU; it is read only."""

TOGETHER = {
    "transformers.md": (
        """
import tempfile
import types
trainer = types.SimpleNamespace(training_step=lambda model, batch: model(**batch).loss)
""",
        """
norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
losses = torch.stack([out.loss.detach(), loss.detach(), share.detach()])
dist.all_reduce(losses)
assert losses[0] == losses[1]
torch.testing.assert_close(losses[2], losses[0], rtol=1e-2, atol=0.0)
plain = AutoModelForCausalLM.from_pretrained("DIR")
total = 0
for lo, hi in ((0, 37), (37, 60)):
    logits = plain(input_ids=ids[:, lo:hi], use_cache=False).logits[0, :-1].float()
    total += torch.nn.functional.cross_entropy(logits, ids[0, lo + 1 : hi], reduction="sum") / 58
torch.testing.assert_close(losses[0], total, rtol=3e-2, atol=0.0)
assert norm > 0
dist.destroy_process_group()
""",
    ),
    "accelerate.md": (
        """
import torch
import transformers
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained("DIR")
rows = [{"input_ids": x, "labels": x} for x in torch.randint(1, 256, (4, 30))]
loader = torch.utils.data.DataLoader(rows, batch_size=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
""",
        """
assert loss.isfinite() and loss > 0
assert sum(p.grad is not None for p in model.parameters()) > 10
accelerator.end_training()
""",
    ),
}
"""Pages whose programs go on from each other: what stands before and after them. The page says how
to start them."""


def ids(found):
    return [b.name for b in found]


def test_each_block_says_what_it_is():
    assert {b.language for b in BLOCKS} == {"bash", "python"}
    assert len(BASH) > 15 and len(PYTHON) > 8
    assert TOGETHER.keys() < {b.page for b in PYTHON}
    fences = sum(len(re.findall(r"^ *(?:```|~~~)", p.read_text(), re.M)) for p in PAGES)
    assert fences == 2 * len(BLOCKS), "a block is indented, or a line stands before its fence"


def test_only_what_must_not_run_is_run_dry():
    found = [f"{shlex.join(words)} " for block in BASH for words in commands(block.code)]
    assert [text for text in DRY | PACKAGES if not any(text in line for line in found)] == []
    assert sum(why_dry(shlex.split(line)) is None for line in found) > 40


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model of transformers and its tokenizer for the pages' DIR."""
    pytest.importorskip("transformers", minversion="5.23")
    from tests.support.stock_folders import TAKEN, save_stock
    from tests.support.tokenizers import save_tokenizer

    folder = tmp_path_factory.mktemp("models") / "DIR"
    save_tokenizer(folder)
    return save_stock(folder, "qwen3_next", vocab_size=400, **TAKEN)


@pytest.mark.parametrize("block", BASH, ids=ids(BASH))
def test_commands_are_right(block, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands(block.code):
        run_dry_with(model_folder, words, tmp_path)


def run_dry_with(model_folder, words, folder):
    run_dry([re.sub(r"\bhf:DIR\b", f"hf:{model_folder}", word) for word in words], folder)


FRAGMENTS = {
    "accelerate launch",
    "fla-cp-train --init-from",
    "python -m benchmarks.tune --stage NAME",
    "python -m fla_cp.train.torchrun",
    "python launch/evaluate.py",
    "python launch/generate.py",
    "sbatch launch/slurm.sh",
    "torchrun --nnodes N",
}
"""Parts of commands in sentences, which lack arguments that a program needs."""
INLINE = {str(p.relative_to(ROOT)): inline_commands(p) for p in PAGES if p.name != "log.md"}
"""Page -> commands in its sentences. log.md quotes commands as they were at its dates."""


@pytest.mark.parametrize("page", [page for page, found in INLINE.items() if found])
def test_commands_in_sentences_are_right(page, model_folder, tmp_path):
    """They are run dry: what a sentence is about is in a block, or is measured on GPUs."""
    for command in dict.fromkeys(INLINE[page]):
        if command not in FRAGMENTS:
            run_dry_with(model_folder, shlex.split(command), tmp_path)


def test_fragments_are_in_the_pages():
    assert {command for found in INLINE.values() for command in found} >= FRAGMENTS


@pytest.mark.parametrize(
    "command, reason",
    [
        ("fla-cp-train --cpp 2", "--cpp"),
        ("fla-cp-train --seq-len 0", "--seq-len must be at least 2"),
        ("make train ARGS='--seq-len 0'", "--seq-len must be at least 2"),
        ("torchrun --nproc-per-node 4 launch/train.py --cp 3", "4 ranks are started, 3 are"),
        ("torchrun --nproc-per-node 4 launch/trian.py", "launch/trian.py"),
        ("torchrun --nproc-per-nodes 4 launch/train.py", "--nproc-per-nodes"),
        ("torchrun examples/transformers_hybrid.py --tokenz 5", "--tokenz"),
        ("accelerate launch --fsdp_version 2 examples/none.py", "examples/none.py"),
        ("sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --cp 4 --dp-shard 2", "16 ranks are"),
        ("sbatch --nodes 2 --gpus 8 launch/slurm.sh --cp 8", "--gpus-per-node"),
        ("kubectl apply -f launch/kubernete.yaml", "launch/kubernete.yaml"),
        ("kubectl apply -k launch", "-f"),
        ("kubectl get trainjobb fla-cp", "trainjobb"),
        ("fla-cp-export run out --dtype float7", "float7"),
        ("fla-cp-plot runs/a --until 3", "until"),
        ("fla-cp-generate runs/a --prompt a --beams 3", "beams"),
        ("fla-cp-tokenize text:a --tokenizer c --out b --no-such-flag", "--no-such-flag"),
        ("python -m benchmarks.train --modells 340M", "--modells"),
        ("python -m benchmarks.trains", "benchmarks.trains"),
        ("python -m tests.gpu --parts attention", "--parts"),
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


def test_every_program_of_the_package_can_be_run():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ENTRY.keys() == project["scripts"].keys()
    for name, code in ENTRY.items():
        module, _, function = project["scripts"][name].partition(":")
        assert code.startswith(f"from {module} import {function}"), name


@pytest.mark.wide
@pytest.mark.parametrize("name", ENTRY)
def test_every_program_starts_by_itself(name, tmp_path):
    """The other tests start programs by `warm_python`, which has imported more than they do."""
    command = [sys.executable, "-c", ENTRY[name], "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name} ")


def section(block):
    heading = re.sub(r"\W+", "-", block.section.lower()).strip("-")
    return f"{block.page}#{heading}".rstrip("#")


def runs(block):
    """Whether the block is a program that runs by itself, or has a command that runs."""
    if block.language == "python":
        return block in PYTHON
    return any(why_dry(words) is None for words in commands(block.code))


RUN = [b for b in BLOCKS if b.page not in (GPU_ONLY, *TOGETHER) and runs(b)]


@pytest.mark.wide
@pytest.mark.parametrize("name", dict.fromkeys(section(b) for b in RUN))
def test_what_a_section_says_runs(name, model_folder, tmp_path):
    """Commands and programs in the order of the page, in one folder that looks like a clone."""
    as_clone(tmp_path)
    (tmp_path / "DIR").symlink_to(model_folder)
    for folder, lines in (("corpus", 50), ("more", 50), ("my_corpus", 50), ("books", 600)):
        (tmp_path / folder).mkdir()
        for n in range(20):
            (tmp_path / folder / f"{n}.txt").write_text(f"The old owl sees {n} stones.\n" * lines)
    for file in ("page.txt", "long.txt"):
        (tmp_path / file).write_text("The young owl sees no stone.\n" * 30)
    here = [b for b in RUN if section(b) == name]
    save_published("".join(b.code for b in here), tmp_path)
    for block in here:
        if block.language == "python":
            run_program(block, tmp_path)
            continue
        short = SHORT if block.page == "README.md" else block.words
        for words in commands(block.code):
            if why_dry(words) is None:
                run(shortened(words, short), tmp_path)


def save_published(code, folder):
    """Writes the folders that the code names, with random weights of small sizes."""
    from tests.support.stock_folders import TAKEN, save_stock

    for name, (kind, sizes) in PUBLISHED.items():
        if name in code:
            own = TAKEN if kind == "qwen3_next" else {}
            save_stock(folder / name, kind, **(own | sizes))


def run_program(block, folder):
    """Runs a program on as many ranks as it is for, and with one if it says that results agree."""
    (folder / "script.py").write_text(block.code)
    ranks = int(dict(word.split("=") for word in block.words).get("ranks", 1))
    if ranks == 1:
        run(["python", "script.py"], folder)
        return
    lines = tokens_and_norms(run(["torchrun", "--nproc-per-node", str(ranks), "script.py"], folder))
    assert sorted(rank for rank, *_ in lines) == [str(n) for n in range(ranks)]
    assert sum(int(tokens) for _, tokens, _ in lines) == 300
    norms = {norm for *_, norm in lines}
    assert len(norms) == 1
    if norms != {""}:
        ((_, tokens, norm),) = tokens_and_norms(run(["python", "script.py"], folder))
        assert tokens == "300"
        assert float(norm) == pytest.approx(float(norms.pop()), rel=1e-3)


def tokens_and_norms(shown):
    return re.findall(r"rank (\d): (\d+) tokens(?:, gradient norm ([\d.]+))?", shown)


@pytest.mark.wide
@pytest.mark.parametrize("page", TOGETHER)
def test_programs_that_go_on_from_each_other(page, model_folder, tmp_path):
    before, after = TOGETHER[page]
    text = (ROOT / "docs" / page).read_text()
    (launcher,) = re.findall(r"((?:torchrun|accelerate launch) [^`\n]*) script\.py", text)
    start = [*launcher.split(), "script.py"]
    assert all(commands(block.code) == [start] for block in BASH if block.page == page)
    middle = "".join(b.code for b in PYTHON if b.page == page)
    code = "".join((before, middle, after)).replace('"DIR"', repr(model_folder))
    code = code.replace('"DIR-text"', "tempfile.mkdtemp()")  # each rank writes its own
    (tmp_path / "script.py").write_text(code)
    run(start, tmp_path)


def test_the_program_for_gpus_calls_what_exists():
    (block,) = [b for b in PYTHON if b.page == GPU_ONLY]
    tree = ast.parse(block.code)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    (call,) = [n for n in calls if getattr(n.func, "id", "") == "build_cp_context"]
    named = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    context = build_cp_context(torch.tensor([0, 60, 100]), None, **named)
    (update,) = [n for n in calls if getattr(n.func, "attr", "") == "update"]
    offsets = torch.tensor([0, 10, 90, 100])
    context.update(*[offsets] * len(update.args))
    assert context.global_cu_seqlens[:4] == (0, 10, 90, 100)
