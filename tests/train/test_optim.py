"""Muon beside AdamW: equal to one rank's, saved and loaded; schedules; clipping."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fla_cp.train import checkpoint
from fla_cp.train.build import build_sharded
from fla_cp.train.checkpoint import Progress
from fla_cp.train.config import OptimConfig, UserError
from fla_cp.train.mixers import MIXERS
from fla_cp.train.model import Decoder
from fla_cp.train.optim import (
    Optimizers,
    ShardedAdamW,
    ShardedMuon,
    build_optimizer,
    learning_rate,
    orthogonalised,
    update,
    update_ahead,
)
from fla_cp.train.parse import parse
from fla_cp.train.saver import Saver
from tests.support.checkpoints import FLAGS, VOCAB, OneRank, names
from tests.support.meshes import ranks_of

# more matrices than ranks, wide and tall; some have fewer rows than there are ranks
SHAPES = [(48, 32), (32, 48), (33, 16), (3, 64), (1, 64), (7, 7), (64, 2)]
RATES = (0.1, 0.03, 0.02)


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def take_steps(parameters, kind, to_grad=lambda g: g, **options):
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, momentum=0.9, **options)
    for step, rate in enumerate(RATES):
        for parameter, grad in zip(parameters, drawn(step + 1), strict=True):
            parameter.grad = to_grad(grad)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def of_torch():
    """The parameters after torch's own steps on whole matrices."""
    parameters = [nn.Parameter(x) for x in drawn(0)]
    take_steps(parameters, torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    return [p.detach() for p in parameters]


@pytest.mark.bits
def test_muon_of_whole_matrices_is_torchs():
    parameters = [nn.Parameter(x) for x in drawn(0)]
    take_steps(parameters, ShardedMuon)
    torch.testing.assert_close([p.detach() for p in parameters], of_torch(), rtol=0, atol=0)


def _sharded(group, rank, replicas):
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("copies", "shards"))
    placements = [Replicate(), Shard(0)]
    if replicas == 1:
        mesh, placements = mesh["shards"], [Shard(0)]
    parameters = [nn.Parameter(distribute_tensor(x, mesh, placements)) for x in drawn(0)]
    take_steps(parameters, ShardedMuon, lambda g: distribute_tensor(g, mesh, placements))
    return [p.full_tensor().detach() for p in parameters]


@pytest.mark.bits
@pytest.mark.parametrize("replicas", [1, 2])
def test_muon_of_shards_is_torchs_on_one_rank(gloo_pool, replicas):
    expected = of_torch()
    for found in gloo_pool.run(_sharded, replicas):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_singular_values_become_about_equal():
    x = torch.randn(40, 24, dtype=torch.float64) @ torch.diag(torch.logspace(-2, 2, 24).double())
    found = torch.linalg.svdvals(orthogonalised(x, (3.4445, -4.7750, 2.0315), 10, 1e-7))
    assert found.min() > 0.6 and found.max() < 1.3
    assert torch.equal(orthogonalised(0 * x, (3.4445, -4.7750, 2.0315), 5, 1e-7), 0 * x)


@pytest.mark.parametrize("mixer", MIXERS)
def test_muon_takes_the_matrices_of_linear_layers_and_adamw_the_rest(mixer):
    config = parse(["--mixer", mixer, "--optimizer", "muon"])
    with torch.device("meta"):
        model = Decoder(config.model, 256)
    muon, adamw = build_optimizer(model, config.optim)
    of = {p: name for name, p in model.named_parameters()}
    taken, rest = (
        {of[p] for group in part.param_groups for p in group["params"]} for part in (muon, adamw)
    )
    assert taken | rest == set(of.values()) and not taken & rest
    assert all(name.startswith("blocks.") and of_linear(model, name) for name in taken)
    assert {"blocks.0.mixer.q_proj.weight", "blocks.1.ffn.down.weight"} <= taken
    own = {"attention": "q_norm", "mla": "kv_norm"}.get(mixer, "qkv_conv")
    assert {"embedding.weight", "norm.weight", f"blocks.0.mixer.{own}.weight"} <= rest
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert [group["weight_decay"] for group in muon.param_groups] == [0.1]


def of_linear(model, parameter):
    module, _, name = parameter.rpartition(".")
    return name == "weight" and isinstance(model.get_submodule(module), nn.Linear)


def train(ranks, flags):
    """The weights after three steps whose gradients do not depend on the split."""
    config = parse(f"{FLAGS} {flags}".split())
    model = build_sharded(config.model, VOCAB, 0, ranks, torch.float32)
    optimizer = build_optimizer(model, config.optim)
    for rate in RATES:
        for p in model.parameters():
            p.grad = p.detach().cos()
        update(model, optimizer, rate, grad_norm=10.0, clip=1.0)
    return config, model, optimizer


def whole(model):
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def _save_on_four(group, rank, run, split):
    ranks = ranks_of(split, rank)
    config, model, optimizer = train(ranks, f"{split} --optimizer muon")
    facts = checkpoint.facts(config, VOCAB, 10, torch.float32)
    with contextlib.closing(Saver(run, facts, 9, ranks, lambda line: None)) as saver:
        saver.write(model, optimizer, Progress(3))
    # one step of the same gradients after the checkpoint
    for p in model.parameters():
        p.grad = p.detach().sin()
    update(model, optimizer, 0.05, grad_norm=10.0, clip=1.0)
    return whole(model)


@pytest.mark.parametrize("split", ["--cp 4", "--cp 2 --dp-replicate 2"])
def test_muon_and_its_checkpoints_do_not_depend_on_the_split(gloo_pool, ranks, tmp_path, split):
    results = gloo_pool.run(_save_on_four, tmp_path, split)
    one = OneRank(ranks, "--optimizer muon", seed=7)
    assert one.load(tmp_path / "checkpoints" / "step-00000003") == Progress(3)
    _, alone, optimizer = train(ranks, "--optimizer muon")
    torch.testing.assert_close(whole(one.model), whole(alone), rtol=1e-5, atol=1e-6)
    for model, stepper in ((alone, optimizer), (one.model, one.optimizer)):
        for p in model.parameters():
            p.grad = p.detach().sin()
        update(model, stepper, 0.05, grad_norm=10.0, clip=1.0)
    # the step after the checkpoint shows that momenta and moments were loaded, too
    for found in (*results, whole(one.model)):
        torch.testing.assert_close(found, whole(alone), rtol=1e-3, atol=1e-4)


def test_checkpoint_of_two_optimisers(ranks, tmp_path):
    one, other = (OneRank(ranks, "--optimizer muon", seed=seed) for seed in (0, 1))
    assert isinstance(one.optimizer, Optimizers)
    one.update()
    path = one.save(tmp_path, 5)
    saved = one.tensors()
    assert "blocks.0.ffn.up.weight.momentum_buffer" in saved
    assert "embedding.weight.exp_avg_sq" in saved
    other.load(path)
    torch.testing.assert_close(other.tensors(), saved, rtol=0, atol=0)
    assert [g["lr"] for g in other.optimizer.param_groups] == [one.config.optim.lr] * 3
    assert names(tmp_path) == ["step-00000005"]


def test_the_state_of_another_optimiser_is_refused(ranks, tmp_path):
    adamw, muon = OneRank(ranks), OneRank(ranks, "--optimizer muon")
    path = adamw.save(tmp_path, 5)
    assert checkpoint.check_matches(path, adamw.facts()) == []
    with pytest.raises(UserError, match=r"with --optimizer adamw, whose state --optimizer muon "):
        checkpoint.check_matches(path, muon.facts())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_clipping_scales_gradients_and_zero_leaves_them(ranks, name):
    for clip in (0.0, 2.0, 20.0):
        one = OneRank(ranks, f"--optimizer {name}")
        for p in one.model.parameters():
            p.grad = p.detach().cos()
        grads = [p.grad.full_tensor().clone() for p in one.model.parameters()]
        update(one.model, one.optimizer, 0.5, grad_norm=8.0, clip=clip)
        factor = 0.25 if clip == 2.0 else 1.0
        found = [p.grad.full_tensor() for p in one.model.parameters()]
        torch.testing.assert_close(found, [factor * g for g in grads])
        assert {group["lr"] for group in one.optimizer.param_groups} == {0.5}


def _adamw_steps(group, rank):
    """Weights after steps of ShardedAdamW and of torch's AdamW on the same sharded parameters."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    for kind in (ShardedAdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in drawn(0)]
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1, fused=True)
        for step in range(3):
            for p, grad in zip(parameters, drawn(step + 1), strict=True):
                p.grad = distribute_tensor(grad, mesh, [Shard(0)])
            optimizer.step()
        state = [optimizer.state[p]["exp_avg_sq"] for p in parameters]
        assert all(isinstance(t, DTensor) for t in state)
        found.append([t.full_tensor().detach() for t in (*parameters, *state)])
    return found


@pytest.mark.bits
def test_adamw_of_shards_is_torchs(gloo_pool):
    for ours, torchs in gloo_pool.run(_adamw_steps):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


@pytest.mark.parametrize("clip", [0.0, 2.0, 20.0])
def test_a_step_before_the_norm_is_known_is_the_same(ranks, clip):
    ahead, known = (OneRank(ranks) for _ in range(2))
    for one in (ahead, known):
        for p in one.model.parameters():
            p.grad = p.detach().cos()
    norm, yes, no = torch.tensor(8.0, dtype=torch.float64), torch.tensor(True), torch.tensor(False)
    update(known.model, known.optimizer, 0.5, 8.0, clip)
    before = whole(ahead.model)
    assert update_ahead(ahead.optimizer, 0.5, norm * math.nan, no, clip)
    torch.testing.assert_close(whole(ahead.model), before, rtol=0, atol=0)
    assert update_ahead(ahead.optimizer, 0.5, norm, yes, clip)
    torch.testing.assert_close(whole(ahead.model), whole(known.model), rtol=1e-6, atol=1e-7)
    steps = [state["step"].item() for state in ahead.optimizer.state.values()]
    assert set(steps) == {1.0}
    assert {group["lr"] for group in ahead.optimizer.param_groups} == {0.5}


def test_muon_and_fp64_wait_for_the_norm(ranks):
    norm, yes = torch.tensor(8.0), torch.tensor(True)
    assert not update_ahead(OneRank(ranks, "--optimizer muon").optimizer, 0.5, norm, yes, 1.0)
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    assert not update_ahead(ShardedAdamW([wide], lr=0.1, fused=True), 0.5, norm, yes, 1.0)
    assert wide.tolist() == [1.0, 1.0]


def test_muon_refuses_a_closure():
    muon = ShardedMuon([nn.Parameter(torch.ones(2, 2))], lr=0.1, weight_decay=0.0, momentum=0.9)
    with pytest.raises(ValueError, match="closure must be None"):
        muon.step(lambda: 1.0)


def test_wsd_is_stable_and_then_decays():
    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1, schedule="wsd")
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:16] == [1.0] * 12  # the last fifth decays
    assert rates[16:] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    # a longer run has the same rates up to its own decay, so it can go on from a checkpoint
    assert [learning_rate(config, step, 100) for step in range(1, 17)] == rates[:16]
    none = OptimConfig(lr=1.0, warmup_steps=0, schedule="wsd", decay_ratio=0.0)
    assert [learning_rate(none, step, 5) for step in range(1, 6)] == [1.0] * 5
    # a warm-up that reaches into the decay ends first
    long = OptimConfig(lr=1.0, warmup_steps=8, min_lr_ratio=0.0, schedule="wsd", decay_ratio=0.9)
    rates = [learning_rate(long, step, 10) for step in range(1, 11)]
    assert rates[7] == 1.0 and rates[8:] == pytest.approx([0.5, 0.0])
    assert all(math.isfinite(learning_rate(long, step, 10)) for step in (1, 10, 11, 50))


def test_wsd_is_that_of_transformers():
    """Its linear form. Only the warm-up differs, which there begins at the smallest rate."""
    wsd = pytest.importorskip("transformers.optimization").get_wsd_schedule
    warmup, stable, decay = 4, 11, 5
    sizes = {"num_warmup_steps": warmup, "num_stable_steps": stable, "num_decay_steps": decay}
    for smallest in (0.0, 0.1):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        (theirs,) = wsd(optimizer, **sizes, decay_type="linear", min_lr_ratio=smallest).lr_lambdas
        config = OptimConfig(
            lr=1.0,
            warmup_steps=warmup,
            min_lr_ratio=smallest,
            schedule="wsd",
            decay_ratio=decay / (warmup + stable + decay),
        )
        for step in range(1 if smallest == 0 else warmup, warmup + stable + decay + 1):
            rate = learning_rate(config, step, warmup + stable + decay)
            assert rate == pytest.approx(theirs(step)), step
