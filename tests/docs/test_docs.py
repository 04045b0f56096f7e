"""What README and the pages of docs/ say is run, recomputed or measured here."""

import dataclasses
import re
import subprocess
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import build_cp_context, chunk_kda, cp_chunk_kda
from fla_cp.comm import collectives
from fla_cp.comm.keys_values import SCHEMES, Sizes
from fla_cp.partition.key_tables import KeyTables
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges
from tests.support import peers
from tests.support.closeness import assert_exact
from tests.support.processes import environment
from tests.support.ranks import run_threads
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()

PAGES = (
    *("choosing", "coming-from", "coming-from-fla", "concepts", "convolution", "cuda_graphs"),
    *("design", "evaluation", "examples", "export", "first_calls", "index", "long-context"),
    *("training", "troubleshooting"),
)
WRITTEN = (
    *("runs", "checkpoints", "config.toml", "metrics.jsonl", "config.json", "profile"),
    *("trackers.json", "tensorboard", "wandb", "mlflow", "comet_ml", ".aim", "swanlab", "dvclive"),
)
"""What a run or an export writes."""


def tables(text, heading):
    """The tables below a heading, each a list of rows of stripped cells without its rule line."""
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, flags=re.M)
    rows = [[line.strip("|\n ").split("|") for line in b.splitlines()] for b in blocks]
    return [[[c.strip(" `") for c in row] for row in [b[0], *b[2:]]] for b in rows]


def numbers(cell):
    return torch.tensor([float(x) for x in re.findall(r"-?[\d.]+", cell)], dtype=torch.float64)


def flow(text):
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def example(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len([line for line in code.splitlines() if line]) <= 17
    path = tmp_path / "example.py"
    path.write_text(code)
    return path


def run_example(example, *launcher):
    alone = environment()
    alone.pop("RANK", None)
    command = [*warm_python(), *launcher, str(example)]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return re.findall(r"rank (\d): (\d+) of 300 tokens, \|o\| ([\d.]+)", done.stdout)


def test_readme_example_gives_the_same_on_one_rank_and_on_two(example):
    ((rank, tokens, norm),) = run_example(example)
    assert (rank, tokens) == ("0", "300")
    assert float(norm) > 0
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sharded = sorted(run_example(example, *torchrun))
    assert sharded == [("0", "150", norm), ("1", "150", norm)]


def test_the_example_of_convolutions_with_states():
    text = (ROOT / "docs" / "convolution.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    found = {}
    exec(code, found)  # it compares its results itself
    assert found["state"].equal(found["x"][:, -4:].mT)


def test_the_examples_of_a_cache_and_of_a_pool():
    text = (ROOT / "docs" / "generation.md").read_text()
    of_cache, of_pool = re.findall(r"```python\n(.*?)```", text, re.S)
    found = {}
    exec(of_cache, found)  # it compares its results itself
    assert found["cache"].state.shape == (2, 2, 32, 32)
    exec(of_pool, found)
    written = found["pool"].flatten(1).any(1)
    assert written.tolist() == [True] * 6 + [False] * 2


def test_readme_starts_with_the_two_commands():
    first = re.search(r"```bash\n(.*?)```", README, re.S).group(1)
    assert [line.split("#")[0].split() for line in first.splitlines()] == [
        ["make", "train"],
        ["make", "test"],
    ]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {"train", "test"} <= set(targets)


def trainer_flags():
    """Short flag -> default, from the trainer's dataclasses."""
    from fla_cp.train.config import TrainConfig

    found = {"--config": None}
    for section in dataclasses.fields(TrainConfig):
        if section.default_factory is dataclasses.MISSING:
            continue
        kind = section.default_factory
        for name, hint in kind.__annotations__.items():
            for short in re.findall(r"_short\('([^']+)'\)", str(hint).replace('"', "'")):
                found[short] = getattr(kind(), name)
    return found


def test_documented_flags_and_defaults_are_the_trainers():
    (table,) = tables(TRAINING, "Flags")
    shown = {row[0]: row[1] for row in table[1:]}
    assert shown == {
        flag: str(default) for flag, default in trainer_flags().items() if flag in shown
    }
    issue = "--cp --dp-shard --dp-replicate --max-steps --seq-len --model --data --resume"
    daily = f"{issue} --eval-every --checkpoint-every --out --device --impl --seed --config".split()
    assert set(daily) <= set(shown)


def test_documented_defaults_of_models_are_the_trainers():
    from fla_cp.train.config import FOLDER_RECIPE, RECIPES

    (table,) = tables(TRAINING, "Defaults by model")
    order = ("lr", "warmup_steps", "max_steps")
    assert table[0] == ["--model", *(f"--{name.replace('_', '-')}" for name in order)]
    shown = {row[0]: [float(cell) for cell in row[1:]] for row in table[1:]}
    recipes = RECIPES | {"hf:DIR": FOLDER_RECIPE}
    assert shown == {size: [getattr(r, name) for name in order] for size, r in recipes.items()}


def test_pages_stay_short():
    assert len(README.splitlines()) <= 130
    assert len(DESIGN.splitlines()) <= 325


def test_documented_exit_codes_are_the_trainers():
    from fla_cp.train import exit_codes

    rows = tables(TRAINING, "When something goes wrong")[0][1:]
    documented = {int(code) for row in rows for code in re.findall(r"\b\d\b", " ".join(row[2:]))}
    assert documented == {n for n in vars(exit_codes).values() if type(n) is int}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{n}.md" for n in PAGES)])
def test_named_files_exist(name):
    """Files in backticks; without a folder at their start they are below fla_cp or unique there."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.S)
    below = {str(p.relative_to(ROOT)) for p in ROOT.glob("[a-zA-Z]*/**/*") if "runs" not in p.parts}
    for path in re.findall(r"`([\w/.]+(?:\.(?:py|json|toml|sh)|/))`", text):
        named = path.rstrip("/")
        exists = (ROOT / named).exists() or any(p.endswith(f"/{named}") for p in below)
        assert exists or named in WRITTEN, f"{name} names {path}"


def test_links_lead_to_files():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@dataclasses.dataclass
class Token:
    """A row of the worked example."""

    a: Tensor
    k: Tensor
    b: Tensor
    v: Tensor
    M: Tensor
    B: Tensor


def worked_tokens():
    rows = tables(DESIGN, "Worked example")[0][1:]
    assert [(row[0], row[1]) for row in rows] == [("1", "0"), ("2", "0"), ("3", "1"), ("4", "1")]
    fields = [[numbers(cell) for cell in row[2:]] for row in rows]
    return [Token(a, k, b, v, M.view(2, 2), B.view(2, 1)) for a, k, b, v, M, B in fields]


def worked_runs():
    rows = tables(DESIGN, "Worked example")[1][1:]
    return {row[0]: (numbers(row[1]).view(2, 2), numbers(row[2]).view(2, 1)) for row in rows}


def compose(first, then):
    return then[0] @ first[0], then[0] @ first[1] + then[1]


def test_worked_example_maps_and_their_composition():
    tokens, runs = worked_tokens(), worked_runs()
    for t in tokens:
        k = t.k[:, None]
        M = (torch.eye(2, dtype=torch.float64) - t.b * k @ k.T) @ torch.diag(t.a)
        assert_exact("M", t.M, M)
        assert_exact("B", t.B, t.b * k * t.v)
    maps = [(t.M, t.B) for t in tokens]
    composed = {"rank 0": compose(*maps[:2]), "rank 1": compose(*maps[2:])}
    composed["both"] = compose(composed["rank 0"], composed["rank 1"])
    assert composed.keys() == runs.keys()
    for name, (M, B) in composed.items():
        assert_exact(f"M of {name}", M, runs[name][0])
        assert_exact(f"B of {name}", B, runs[name][1])


def column(pattern):
    """The `[x; y]` that the worked example's text shows where the pattern has (.*)."""
    section = flow(DESIGN.split("# Worked example\n")[1])
    return numbers(re.search(pattern.replace("(.*)", r"`(\[[^`]*\])`"), section).group(1)).view(
        2, 1
    )


def run_worked_tokens(group, rank):
    tokens = worked_tokens()
    q, k, a, v = (
        torch.stack(x).view(1, 4, 1, -1)
        for x in (
            [t.k for t in tokens],
            [t.k for t in tokens],
            [t.a for t in tokens],
            [t.v for t in tokens],
        )
    )
    beta = torch.stack([t.b for t in tokens]).view(1, 4, 1)
    context = build_cp_context(torch.tensor([0, 4]), group)
    local = [context.shard(x) for x in (q, k, v, a.log(), beta)]
    _, empty = cp_chunk_kda(*local, context, output_final_state=True)
    start = column(r"Started from (.*) instead").view(1, 1, 2, 1).clone().requires_grad_()
    _, seeded = cp_chunk_kda(*local, context, initial_state=start, output_final_state=True)
    seeded.backward(column(r"has the gradient (.*) with").view(1, 1, 2, 1))
    return empty.view(2, 1), seeded.detach().view(2, 1), start.grad.view(2, 1)


def test_worked_example_is_what_two_ranks_compute():
    runs = worked_runs()
    transition, entering = runs["rank 1"][0], runs["rank 0"][1]
    passed_on = transition.T @ column(r"has the gradient (.*) with")
    assert_exact("passed on", passed_on, column(r"passes on its M\^T times that, (.*),"))
    first = column(r"initial state is (.*)\.")
    assert_exact("gradient of the initial state", runs["rank 0"][0].T @ passed_on, first)
    assert_exact("B", transition @ entering + runs["rank 1"][1], runs["both"][1])
    for empty, seeded, gradient in run_threads(run_worked_tokens, 2):
        torch.testing.assert_close(empty, runs["both"][1])
        torch.testing.assert_close(seeded, column(r"the whole leaves (.*)\."))
        torch.testing.assert_close(gradient, column(r"initial state is (.*)\."))


HEADS, SIZE_K, SIZE_V = 24, 2, 97  # so that a sum of bytes tells how many S and how many M it holds


def received_bytes(group, rank, scheme, counters):
    torch.manual_seed(0)
    T = 2 * dist.get_world_size(group)
    context = build_cp_context(torch.tensor([0, T]), group, exchange=scheme)
    q, k, g = torch.randn(3, 1, T, HEADS, SIZE_K).unbind()
    v, beta = torch.randn(1, T, HEADS, SIZE_V), torch.rand(1, T, HEADS)
    local = [context.shard(x) for x in (q, k, v, -g.abs(), beta)]
    counters[threading.get_ident()] = 0
    cp_chunk_kda(*local, context)
    return counters[threading.get_ident()]


@pytest.mark.parametrize("scheme", ["all_gather", "ring", "scan", "heads", "symmetric"])
def test_bytes_of_each_exchange(scheme, monkeypatch):
    header, *rows = tables(DESIGN, "Exchange")[0]
    counters = peers.of_threads(monkeypatch)
    all_gather, all_to_all = collectives.all_gather, collectives.all_to_all
    send_and_receive = collectives.send_and_receive

    def count(tensors):
        counters[threading.get_ident()] += sum(x.nbytes for x in tensors)

    def counted_all_gather(x, group):
        count([x] * (dist.get_world_size(group) - 1))
        return all_gather(x, group)

    def counted_send_and_receive(sends, receives, group):
        count([x for x, _ in receives])
        return send_and_receive(sends, receives, group)

    def counted_all_to_all(rows, send, received, group):
        others = sum(received) - received[dist.get_rank(group)]
        counters[threading.get_ident()] += others * rows[0].nbytes
        return all_to_all(rows, send, received, group)

    monkeypatch.setattr(collectives, "all_to_all", counted_all_to_all)
    monkeypatch.setattr(collectives, "all_gather", counted_all_gather)
    monkeypatch.setattr(collectives, "send_and_receive", counted_send_and_receive)
    for ranks, *cells in rows[:-1]:
        S, M = map(Fraction, re.findall(r"[\d/]+", cells[header.index(scheme) - 1]))
        expected = (S * SIZE_V + M * SIZE_K) * HEADS * SIZE_K * 4
        assert max(run_threads(received_bytes, int(ranks), scheme, counters)) == expected, ranks


def test_bytes_of_each_exchange_of_keys_and_values():
    """As `traffic` gives them; tests/comm/test_keys_values.py counts that."""
    header, *rows = tables(DESIGN, "Exchange of keys and values")[0]
    layouts = {"": contiguous_token_ranges, ", zig-zag": zigzag_token_ranges}
    T, H, HK, K, V, itemsize = 24, 16, 8, 5, 3, 2
    token = (K + V) * itemsize
    for ranks, *cells in rows[:-1]:
        R = int(ranks)
        for column, cell in zip(header[1:], cells, strict=True):
            name, comma, rest = column.partition(",")
            ranges = tuple(tuple(r) for r in layouts[comma + rest](T * R, R))
            scheme = SCHEMES[name](KeyTables((0, T * R), ranges, 0), Sizes(H, HK, K, V, itemsize))
            Q, X = map(Fraction, re.findall(r"[\d/]+", cell))
            assert scheme.busiest == (Q * H + X * HK) * T * token, (R, column)


@pytest.mark.parametrize("name", ["default", "disable_recompute=True"])
def test_bytes_kept_for_the_backward(name):
    row = next(row for row in tables(DESIGN, "Memory")[0] if row[0] == name)
    *parts, total = (int(cell) for cell in row[1:])
    assert sum(parts) == total
    T, D = 256, 128
    q, k, v, g = (torch.randn(1, T, 1, D, dtype=torch.bfloat16).requires_grad_() for _ in range(4))
    beta = torch.rand(1, T, 1, dtype=torch.bfloat16).requires_grad_()
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        chunk_kda(q, k, v, -g.abs(), beta, disable_recompute=name != "default")
    # The sign and magnitude of g are torch's own to save: outside the operator.
    outside = {g.untyped_storage().data_ptr()}
    per_token = sum(size for at, (size, _) in kept.items() if at not in outside) / T
    assert per_token == total


def test_segments_of_the_table():
    from fla_cp.partition.packing import Packing
    from fla_cp.partition.segmentation import split

    header, *rows = tables(DESIGN, "Segments inside a GPU")[0]
    heads = [int(re.search(r"\d+", cell).group()) for cell in header[1:]]
    for T, *cells in rows:
        for n, cell in zip(heads, cells, strict=True):
            whole = Packing.build((0, int(T)))
            assert len(split(whole, 4 * n, 4 * n, 132).segments) == int(cell), (T, n)
