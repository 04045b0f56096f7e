"""--remat and --offload: equal gradients, exchanges that are not repeated, bytes that are kept."""

import re
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from fla_cp import build_cp_context, remat
from fla_cp.comm import collectives
from fla_cp.nn.projections import COLUMNS
from fla_cp.rule import CHUNK, DeltaRule
from fla_cp.train.build import build_sharded
from fla_cp.train.config import UserError
from fla_cp.train.device_rules import check_impl
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import load_toml, parse
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

D, HEADS, K = 32, 2, 16
SIZES = (
    f"--model.layers 2 --model.hidden-size {D} --model.num-heads {HEADS} --model.head-dim {K} "
    "--impl torch "
)
MODES = [f"--remat {m}{o}" for m in ("none", "selective", "full") for o in ("", " --offload")]
CU = (0, 1, 64, 130, 131, 300)


def decoder(flags):
    return build_model(parse((SIZES + flags).split()).model, 64, seed=0)


@pytest.mark.parametrize(
    "flags, mode",
    [
        ("", "none"),
        ("--remat", "full"),
        ("--remat --cp 1", "full"),
        ("--model.remat", "full"),
        ("--remat full", "full"),
        ("--remat selective", "selective"),
        ("--model.remat selective", "selective"),
        ("--remat=selective", "selective"),
        ("--remat none", "none"),
        ("--no-remat", "none"),
        ("--remat --model.no-remat", "none"),
        ("--no-remat --remat", "full"),
    ],
)
def test_flag_with_and_without_a_value(flags, mode):
    assert parse(flags.split()).model.remat == mode


def test_unknown_mode_is_refused():
    rule = "--remat must be one of none, selective, full, got 'some'"
    with pytest.raises(UserError, match=f"^{rule}$"):
        parse(["--remat", "some"])


@pytest.mark.parametrize(
    "value, mode",
    [("true", "full"), ("false", "none"), ('"selective"', "selective"), ('"full"', "full")],
)
def test_toml_of_this_version_and_of_earlier_ones(tmp_path, value, mode):
    path = tmp_path / "config.toml"
    path.write_text(f"[model]\nremat = {value}\n")
    assert load_toml(path).model.remat == mode
    assert parse(["--config", str(path)]).model.remat == mode
    assert parse(["--config", str(path), "--remat", "none"]).model.remat == "none"


@pytest.mark.parametrize("value", ["1", '"some"', '"true"'])
def test_toml_refuses_other_values(tmp_path, value):
    path = tmp_path / "config.toml"
    path.write_text(f"[model]\nremat = {value}\n")
    with pytest.raises(UserError, match=r"model.remat in .* must be one of 'none', 'selective'"):
        load_toml(path)


def test_offload_is_refused_on_the_cpu(ranks):
    check_impl(parse([]), ranks)
    with pytest.raises(UserError, match=r"--offload needs --device cuda: on the CPU .* --no-offl"):
        check_impl(parse(["--offload"]), ranks)


def step(group, rank, models, counts):
    """For each model the loss, the gradients and the collectives of this rank."""
    context = build_cp_context(torch.tensor(CU), group, conv1d_kernel_size=4)
    every = torch.arange(CU[-1])[None] * 7 % 64
    tokens = context.shard(every)
    found = []
    for model in models:
        before = Counter(counts.get(threading.get_ident()))
        loss = model(tokens, context).sin().sum()  # in fp64; every logit counts
        grads = torch.autograd.grad(loss, list(model.parameters()))
        calls = Counter(counts.get(threading.get_ident())) - before
        found.append((loss.detach(), grads, calls))
    return found


@pytest.mark.parametrize("mixer, R", crossed(["kda", "gdn"], [1, 2, 4]))
def test_modes_train_alike_and_selective_exchanges_once(mixer, R, monkeypatch):
    counts: dict[int, Counter] = {}
    lock = threading.Lock()

    def counting(name, call):
        def counted(*args):
            with lock:
                counts.setdefault(threading.get_ident(), Counter())[name] += 1
            return call(*args)

        return counted

    for name in ("all_gather", "all_to_all", "all_reduce", "send_and_receive"):
        monkeypatch.setattr(collectives, name, counting(name, getattr(collectives, name)))
    models = [decoder(f"--mixer {mixer} {mode}").double() for mode in MODES]
    ranks = run_threads(step, R, models, counts)
    for per_rank in ranks:
        totals = [calls.total() for _, _, calls in per_rank]
        assert totals[:4] == [totals[0]] * 4
        assert totals[4] == totals[5]
        assert (totals[4] > totals[0]) == (R > 1)
    (exact,) = run_threads(step, 1, models[:1], {})[0]
    for i, mode in enumerate(MODES):
        assert_exact(mode, sum(r[i][0] for r in ranks), exact[0])
        names = (name for name, _ in models[i].named_parameters())
        for name, *parts in zip(names, exact[1], *(r[i][1] for r in ranks), strict=True):
            assert_exact(f"{name}, {mode}", sum(parts[1:]), parts[0])


def test_modes_under_fsdp(ranks):
    """Parameters are gathered inside the block: they must neither be copied nor be missed."""
    context = build_cp_context(torch.tensor(CU), None, conv1d_kernel_size=4)
    tokens = torch.arange(CU[-1])[None] * 7 % 64
    found = []
    copies: list[tuple[int, ...]] = []
    copy = remat.HostCopy.__init__

    def counted(self, x):
        copies.append(tuple(x.shape))
        copy(self, x)

    with mock.patch.object(remat.HostCopy, "__init__", counted):
        for mode in MODES:
            copies.clear()
            config = parse((SIZES + mode).split()).model
            model = build_sharded(config, 64, 0, ranks, torch.float64)
            loss = model(tokens, context).sin().sum()
            loss.backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            found.append((loss.detach(), *grads))
            assert bool(copies) == config.offload
            assert not {shape for shape in copies if CU[-1] not in shape} & {
                shape
                for p in model.parameters()
                for shape in (tuple(p.shape), tuple(p.shape)[::-1])
            }
    for mode, other in zip(MODES, found, strict=True):
        for i, (a, b) in enumerate(zip(other, found[0], strict=True)):
            assert_exact(f"result {i}, {mode}", a, b)


def kept_bytes(model: Decoder, T: int) -> int:
    """Bytes that the model's blocks keep for the backward, each storage counted once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def note(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes(), x
        return x

    def keep(call, tensors):
        for x in tensors:
            if x is not None:
                note(x)

    context = build_cp_context(torch.tensor([0, T]), None, conv1d_kernel_size=4)
    x = torch.randn(1, T, D, requires_grad=True)
    with (
        mock.patch.object(remat, "keep", keep),
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
    ):
        for block in model.blocks:
            x, _ = model.run_block(block, x, context)
    return sum(size for size, _ in kept.values())


PAGE = Path(__file__).parents[2] / "docs/training.md"


def table(head: str) -> list[list[str]]:
    """The rows of the page's table whose head begins so."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    rows = []
    for line in lines[lines.index(next(x for x in lines if x.startswith(head))) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """The value of a sum such as `6D + 12N + 2`."""
    terms = [re.fullmatch(r"(\d*)([A-Z]?)", term) for term in formula.split(" + ")]
    assert all(terms), formula
    return sum(int(t[1] or 1) * sizes.get(t[2], 1) for t in terms if t is not None)


def sizes_of(model: Decoder) -> dict[str, int]:
    shape = model.shape
    width = shape.num_heads * shape.head_dim
    heads, dim = shape.num_heads, shape.head_dim
    fill = -(3 * width + 2 * dim + heads) % COLUMNS
    sizes = {"D": shape.hidden_size, "N": width, "H": heads, "K": dim, "F": shape.ffn_size}
    return {**sizes, "P": fill}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_bytes_a_token_and_layer(mode):
    row = next(row for row in table("| `--remat` | float32") if row[0] == mode)
    model = decoder(f"--remat {mode}")
    # the difference leaves out what does not grow with the tokens
    bytes_a_token = (kept_bytes(model, 1024) - kept_bytes(model, 512)) / 512 / 2
    assert bytes_a_token == 4 * evaluate(row[1], sizes_of(model))
    with torch.device("meta"):
        big = Decoder(parse(["--model", "340M"]).model, 64)
    assert int(row[2]) == 4 * evaluate(row[1], sizes_of(big))


def test_bytes_of_selective_in_bfloat16_on_a_gpu():
    """By the shapes that the Triton backend declares, which tests of kernels hold it to."""
    kernels = pytest.importorskip("fla_cp.kernels.triton.backend")
    with torch.device("meta"):
        sizes = sizes_of(Decoder(parse(["--model", "340M"]).model, 64))
    bounded = {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True}
    rule = DeltaRule(1.0, qk_l2norm=True, beta_factor=1.0)._replace(**bounded)

    def kept(**changes):
        given = rule._replace(**changes), torch.bfloat16, 1, sizes["H"], sizes["K"], sizes["K"]
        shapes = kernels.TRITON.kept_shapes(*given)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes) / CHUNK

    unbounded = kept(gate="softplus", lower_bound=None, safe_gate=False) - kept()
    intermediates = (kept(keep_intermediates=True) - kept()) / sizes["H"]
    assert (unbounded * CHUNK / sizes["H"], intermediates) == (4, 1536)
    found = {"selective": 2 * (sizes["D"] + sizes["N"]) + kept(), "full": 2 * sizes["D"]}
    for row in table("| `--remat` | bfloat16"):
        assert int(row[2]) == evaluate(row[1], sizes) == found[row[0]]
    moved = found["selective"] * 131072 * 24 / 2**30
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for claim in (
        f"{moved:.1f} GiB in each direction",
        "adds 4H bytes for each chunk",
        "1536 bytes for each",
    ):
        assert claim in page


def test_nothing_random_is_in_a_block():
    """Checkpoints of the trainer do not save the random generators' states."""
    for mixer in ("kda", "gdn", "comba", "gdp", "gla", "simple_gla"):
        model = decoder(f"--mixer {mixer} --remat")
        assert not [m for m in model.modules() if isinstance(m, nn.Dropout)]
        state = torch.get_rng_state()
        context = build_cp_context(torch.tensor([0, 70]), None, conv1d_kernel_size=4)
        model(torch.zeros(1, 70, dtype=torch.int64), context).sum().backward()
        assert torch.equal(state, torch.get_rng_state())
