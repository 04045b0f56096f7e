"""Decoders with experts: splits, recomputation, loads, biases, checkpoints, rules, operations."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fla_cp.train.main
from fla_cp import build_cp_context
from fla_cp.nn import Experts, Router, SwiGLU
from fla_cp.train.build import build_sharded
from fla_cp.train.checkpoint import checkpoints
from fla_cp.train.config import UserError
from fla_cp.train.data import ArraySource, PackedDataset
from fla_cp.train.device_rules import check_impl
from fla_cp.train.distributed import joined
from fla_cp.train.flops import step_flops
from fla_cp.train.metrics import read_metrics
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.optim import build_optimizer, update
from fla_cp.train.parse import parse
from fla_cp.train.step import Feed, agree, forward_backward, reduce_metrics
from tests.support.closeness import assert_exact
from tests.support.meshes import ranks_of

SIZES = [
    *("--model.layers", "3", "--model.hidden-size", "32", "--model.num-heads", "2"),
    *("--model.head-dim", "16", "--device", "cpu", "--impl", "torch", "--model.dense-layers", "1"),
]
SOFTMAX = ["--model.experts", "6", "--model.shared-experts", "1", "--model.expert-size", "24"]
SIGMOID = [*SOFTMAX, "--model.routing", "sigmoid"]
VOCAB = 64


@pytest.fixture
def ranks():
    """The ranks of a world of one, for one test, since other tests start a world of their own."""
    with joined(parse(["--device", "cpu"]).parallel) as ranks:
        yield ranks


def model_of(*flags):
    return build_model(parse([*SIZES, *flags]).model, VOCAB, 0)


def batch(length=150):
    tokens = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens, build_cp_context(torch.tensor([0, 40, length]), None, conv1d_kernel_size=4)


def packs():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (400,), generator=generator).numpy()
    return PackedDataset(ArraySource(tokens, torch.tensor([0, 30, 210, 400]).numpy(), VOCAB), 40)


def test_blocks_after_the_first_have_experts():
    model = model_of(*SIGMOID)
    assert [type(block.ffn) for block in model.blocks] == [SwiGLU, Experts, Experts]
    assert [layer.shared_gate for layer in model.expert_layers()] == [None, None]
    experts = model_of(*SOFTMAX).expert_layers()[0]
    assert experts.shared_gate is not None and experts.router.correction_bias is None
    # 3 of 8 experts a token are together as wide as the SwiGLU of 128 that they replace
    other = model_of("--model.experts", "8", "--model.experts-per-token", "3").expert_layers()[0]
    assert other.experts.down.shape == (8, 32, 64)


def test_initial_values():
    model = model_of(*SIGMOID)
    names = {name: p.std().item() for name, p in model.named_parameters()}
    residual = 0.02 / math.sqrt(2 * 3)
    for name, std in {
        "router.weight": 0.02,
        "experts.gate_up": 0.02,
        "experts.down": residual,
        "shared.down.weight": residual,
        "shared.up.weight": 0.02,
    }.items():
        assert names[f"blocks.1.ffn.{name}"] == pytest.approx(std, rel=0.15), name
    assert not model.expert_layers()[0].router.correction_bias.any()


def test_the_shown_loss_is_the_cross_entropy():
    tokens, context = batch()
    found = []
    for factor in ("0", "0.5"):
        model = model_of(*SOFTMAX, "--model.aux-loss", factor)
        loss = model(tokens, context, tokens)
        loss.backward()
        found.append((loss.item(), model.expert_layers()[0].router.weight.grad))
    assert found[0][0] == found[1][0]
    assert (found[0][1] - found[1][1]).abs().max() > 1e-3
    with torch.no_grad():
        before = model.balance.counts.clone()
        assert model(tokens, context, tokens).item() == pytest.approx(loss.item())
        assert torch.equal(model.balance.counts, before)


def test_the_balancing_loss_is_that_of_every_target():
    """Its gradient is that of targets * factor * (mean over layers of the layers' losses)."""
    tokens, context = batch()
    labels = tokens.clone()
    labels[:, 100:] = -100
    grads = []
    for factor in ("0", "0.5"):
        model = model_of(*SOFTMAX, "--model.aux-loss", factor).double()
        model(tokens, context, labels).backward()
        grads.append([p.grad for p in model.parameters()])
    model = model_of(*SOFTMAX).double()
    layers, losses = model.expert_layers(), []

    def note(layer, args, output):
        routing = layer.router(args[0].flatten(0, 1))
        f = torch.nn.functional.one_hot(routing.experts, 6).sum(1).double().mean(0)
        losses.append(6 * (f * routing.probabilities.mean(0)).sum())

    for layer in layers:
        layer.register_forward_hook(note)
    model(tokens, context)
    (100 * 0.5 * sum(losses) / 2).backward()
    for (name, p), plain, balanced in zip(model.named_parameters(), *grads, strict=True):
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        assert ((balanced - plain) - wanted).abs().max() < 1e-10, name
    assert layers[0].router.weight.grad.abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("flags", ["--remat", "--remat selective", "--compile on"])
def test_recomputed_and_compiled_blocks_count_once(flags):
    tokens, context = batch()
    found = []
    for more in ("", flags):
        model = model_of(*SOFTMAX, *more.split()).double()
        if "compile" in more:
            torch._dynamo.reset()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            model(tokens, context, tokens).backward()
        found.append((model.balance.counts, [p.grad for p in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][0].sum(1).tolist() == [2 * 2 * 150] * 2
    for plain, grad in zip(found[0][1], found[1][1], strict=True):
        assert_exact("gradient", grad, plain)


def _two_steps(ranks, config):
    """Losses, gradients, loads and biases of two steps in float64, on the host."""
    model = build_sharded(config.model, VOCAB, 0, ranks, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    with Feed(config, packs(), ranks, 0) as feed:
        for step in range(2):
            taken = feed.take()
            targets = agree(taken, ranks).targets
            share = forward_backward(model, taken, targets, config, ranks, step == 0)
            loss, norm = reduce_metrics(share, model, ranks)
            found[f"{step} loss"] = torch.tensor(loss)
            found[f"{step} load"] = torch.tensor(model.balance.load)
            for name, p in model.named_parameters():
                found[f"{step} {name}"] = p.grad.full_tensor()
            update(model, optimizer, 0.1, norm, 0.0)
            optimizer.zero_grad()
            found[f"counts {step}"] = model.balance.counts.clone()
            biases = [layer.router.correction_bias for layer in model.expert_layers()]
            if biases[0] is not None:
                found[f"{step} bias"] = torch.stack(biases)
    return found


def _split_and_alone(group, rank, split, flags):
    ranks = ranks_of(split, rank)
    config = parse([*SIZES, *flags, *split.split(), "--seq-len", "40", "--global-batch-size", "4"])
    alone = ranks.alone()
    return _two_steps(ranks, config), _two_steps(alone, config) if rank == 0 else None


@pytest.mark.parametrize(
    "split, flags",
    [
        ("--cp 4", [*SOFTMAX, "--model.aux-loss", "1.0"]),
        ("--cp 2 --dp-shard 2", [*SIGMOID, "--model.bias-rate", "0.05"]),
        ("--cp 2 --dp-replicate 2", [*SIGMOID, "--model.aux-loss", "1.0", "--remat", "selective"]),
    ],
)
def test_a_split_has_the_gradients_and_loads_of_one_rank(gloo_pool, split, flags):
    results = gloo_pool.run(_split_and_alone, split, flags)
    wanted = results[0][1]
    assert wanted["counts 1"].sum() == 2 * 2 * 160 and wanted["0 load"] > 1
    assert ("0 bias" in wanted) == ("sigmoid" in flags)
    for found, _ in results:
        for key in wanted:
            error = (found[key] - wanted[key]).abs().max()
            least = 1e-6 if "loss" in key else 1e-12  # the trainer sums losses in float32
            assert error <= least * max(1.0, wanted[key].abs().max()), (key, error)


def test_biases_move_towards_equal_loads(ranks):
    config = parse([*SIZES, *SIGMOID, "--model.bias-rate", "0.01", "--seq-len", "40"])
    found, bias = _two_steps(ranks, config), torch.zeros(2, 6, dtype=torch.float64)
    for step in range(2):
        loads = found[f"counts {step}"].double()
        bias += 0.01 * torch.sign(loads.mean(1, keepdim=True) - loads)
        torch.testing.assert_close(found[f"{step} bias"], bias)
    assert found["0 bias"].any()


def test_routers_stay_float32_and_experts_are_sharded(ranks):
    config = parse([*SIZES, *SIGMOID]).model
    model, seen = build_sharded(config, VOCAB, 0, ranks, torch.bfloat16), {}
    router, experts = model.expert_layers()[0].router, model.expert_layers()[0].experts

    def note(module, args):
        seen.update({name: p.dtype for name, p in module.named_parameters()})
        seen.update({name: b.dtype for name, b in module.named_buffers()})

    for module in (router, experts):
        module.register_forward_pre_hook(note)
    tokens, context = batch()
    model(tokens, context, tokens).backward()
    wide = {"weight": torch.float32, "correction_bias": torch.float32}
    assert seen == {**wide, "gate_up": torch.bfloat16, "down": torch.bfloat16}
    assert all(placement.is_shard(0) for placement in experts.down.placements)
    assert router.weight.grad.dtype == torch.float32 and router.weight.grad.to_local().any()


FLAGS = [
    *SIZES,
    *("--seq-len", "64", "--data", "synthetic", "--global-batch-size", "2", "--eval-every", "0"),
    *("--warmup-steps", "1", "--lr", "0.01", "--tracker", "none", "--checkpoint-every", "2"),
]


def train(run, steps, *flags):
    flags = [*FLAGS, *SIGMOID, "--out", str(run), "--max-steps", str(steps), *flags]
    return fla_cp.train.main.main(flags)


def test_a_resumed_run_has_the_biases(tmp_path, monkeypatch, capsys):
    loops = []
    original = fla_cp.train.main.Loop.run_all
    monkeypatch.setattr(
        fla_cp.train.main.Loop,
        "run_all",
        lambda loop, *a: (loops.append(loop), original(loop, *a))[1],
    )
    assert train(tmp_path / "run", 4) == 0
    saved = checkpoints(tmp_path / "run")[0]
    assert saved.name == "step-00000002"
    # the rate is no part of the model, so a resumed run may have another; here it has the same
    more = ("--resume", str(saved), "--model.bias-rate", "0.001", "--model.aux-loss", "0.0")
    assert train(tmp_path / "more", 4, *more) == 0
    assert "was trained with" not in capsys.readouterr().err
    whole, resumed = (
        [layer.router.correction_bias for layer in loop.model.expert_layers()] for loop in loops
    )
    assert len({abs(round(b, 4)) for bias in whole for b in bias.tolist()} - {0.0}) > 1
    torch.testing.assert_close(resumed, whole)
    rows = [read_metrics(tmp_path / name) for name in ("run", "more")]
    for a, b in zip(rows[0][2:], rows[1][-2:], strict=True):
        assert a["expert_load"] == b["expert_load"] >= 1.0
        assert a["loss"] == pytest.approx(b["loss"])
    assert train(tmp_path / "other", 4, "--resume", str(saved), "--model.experts", "8") == 2
    assert "was trained with --model.experts 6" in capsys.readouterr().err


def test_parity_compares_biases(gloo_pool):
    for passed in gloo_pool.run(_parity):
        assert passed in (True, None)


def _parity(group, rank):
    ranks = ranks_of("--cp 2 --dp-shard 2", rank)
    flags = ["--cp", "2", "--dp-shard", "2", "--check-parity", "--parity.steps", "2"]
    batches = ["--seq-len", "40", "--global-batch-size", "4", "--dtype", "float32"]
    config = parse([*SIZES, *SIGMOID, "--model.bias-rate", "0.1", *flags, *batches])
    report = fla_cp.train.parity.compare(config, packs(), ranks)
    run = fla_cp.train.parity.Run(config, packs(), ranks, torch.float32)
    weights = run.weights()
    for name in weights:
        weights[name] = torch.full_like(weights[name], 0.5)
    run.put(weights)
    assert (run.model.expert_layers()[0].router.correction_bias == 0.5).all()
    assert rank or "blocks.1.ffn.router.correction_bias" in weights
    return None if report is None else report.passed


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--model.experts -1", "--model.experts must be at least 0, got -1"),
        (
            "--model.experts 4 --model.routing-scale 0",
            "--model.routing-scale must be above 0, got 0",
        ),
        ("--model.experts 0 --model.routing-scale 2", "left out without --model.experts, got 2.0"),
        (
            "--model kimi-linear --model.experts 4",
            "--model.experts-per-token must be at most the 4 experts, got 8",
        ),
        ("--model.experts 4 --model.experts-per-token 5", "at most the 4 experts, got 5"),
        ("--model.experts 4 --model.dense-layers 3", "below the number of blocks, 3, got 3"),
        ("--model.experts 4 --model.expert-size 0", "--model.expert-size must be at least 1"),
        ("--model.experts 4 --model.aux-loss -1", "--model.aux-loss must be at least 0, got -1.0"),
        (
            "--model.experts 4 --model.bias-rate 0.1",
            "--model.bias-rate must be left out with --model.routing softmax, got 0.1",
        ),
        ("--model.shared-experts 1", "left out without --model.experts, got 1"),
        ("--model.routing sigmoid", "--model.routing must be left out without --model.experts"),
        (
            "--model.experts 4 --check-parity --dp-shard 2 --micro-batch-size 1",
            "--micro-batch-size must be left out with --check-parity",
        ),
    ],
)
def test_rules(flags, message):
    sizes = [
        x for x in SIZES if "--model.experts" in flags or x not in ("--model.dense-layers", "1")
    ]
    with pytest.raises(UserError, match=message):
        parse([*sizes, *flags.split()])


def test_graphs_need_bfloat16(ranks):
    config = parse(["--cuda-graphs", "--model.experts", "4", "--dtype", "float32"])
    on_gpu = object.__new__(type(ranks))
    for name, value in {**vars(ranks), "device": torch.device("cuda")}.items():
        object.__setattr__(on_gpu, name, value)
    with pytest.raises(UserError, match=r"--model.experts needs --dtype bfloat16.* got float32"):
        check_impl(config, on_gpu)


def product(x, weight, *args, out_val=None, **kwargs):
    """Operations of `grouped_linear` and `grouped_outer`: every row meets one matrix."""
    return 2 * x[0] * x[1] * (weight[1] if len(weight) == 2 else math.prod(weight[1:]) // x[1])


def test_operations_are_those_of_the_experts_that_a_token_takes():
    flags = [*SIGMOID, "--model.experts-per-token", "3"]
    model, (tokens, context) = model_of(*flags), batch(128)
    ops = torch.ops.fla_cp

    def of_inverse(A, B, *args, out_val=None, **kwargs):
        *many, C, _ = A
        return math.prod(many) * C * (C - 1) * (C - 2) // 3

    mapping = {ops.grouped_linear: product, ops.grouped_outer: product}
    mapping[torch.ops.aten.linalg_solve_triangular] = of_inverse
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(tokens, context, tokens).backward()
    parts = step_flops(model, 128, [40, 88])
    formula = sum(part.executed for part in parts.values())
    assert formula == pytest.approx(counter.get_total_flops(), rel=1e-6)
    with torch.device("meta"):
        more = Decoder(parse([*SIZES, *flags, "--model.experts", "60"]).model, VOCAB)
    routers = 2 * 128 * 32 * (60 - 6) * 2
    assert step_flops(more, 128)["ffn"].forward == parts["ffn"].forward + routers
    assert isinstance(more.blocks[1].ffn.router, Router)


def test_muon_leaves_experts_to_adamw(ranks):
    config = parse([*SIZES, *SOFTMAX, "--seq-len", "40", "--optimizer", "muon"])
    model = build_sharded(config.model, VOCAB, 0, ranks, torch.float32)
    optimizer = build_optimizer(model, config.optim)
    before = model.expert_layers()[0].experts.down.full_tensor().clone()
    with Feed(config, packs(), ranks, 0) as feed:
        taken = feed.take()
        share = forward_backward(model, taken, agree(taken, ranks).targets, config, ranks)
    loss, norm = reduce_metrics(share, model, ranks)
    update(model, optimizer, 0.01, norm, 1.0)
    after = model.expert_layers()[0].experts.down.full_tensor()
    assert loss == pytest.approx(math.log(VOCAB), rel=0.1)
    assert 0.005 < (after - before).abs().max() < 0.02
