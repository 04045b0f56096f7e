"""A decoding step equals the model's call with a cache, and does not wait for the device."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fla_cp.nn.cache import AttentionCache
from fla_cp.nn.decoding import RecurrentStep, SwiGLUStep, stacked
from fla_cp.nn.linear_attention import GatedDeltaNet
from fla_cp.nn.modules import ShortConvolution
from fla_cp.train.decoding import DecodeStep, Replayed, step_bytes, why_eager
from fla_cp.train.generate import _joined, generate, make_caches, next_logits
from tests.support.adapters import CHANGES
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.exported import MODELS, VOCAB, random_model

PROMPTS = [[5, 17, 80, 3, 41], [2], [int(i * 31 % 97) for i in range(70)]]
KINDS = {name: MODELS[name] for name in ("kimi-experts", "qwen-experts", "yarn", "mla", "kda")} | {
    name: f"--mixer {name}" for name in ("comba", "gdp", "gla", "simple_gla")
}


def filled(model, room=8):
    """Joined caches of unequal prompts."""
    caches = []
    for prompt in PROMPTS:
        caches.append(make_caches(model, 1, max(map(len, PROMPTS)) + room))
        next_logits(model, torch.tensor([prompt]), caches[-1])
    return _joined(caches)


def written(cache):
    """The tensors of a cache."""
    if isinstance(cache, AttentionCache):
        return cache.keys, cache.values, cache.lengths
    return cache.conv, cache.state


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_calls_of_the_model(kind):
    """Also in what they leave in the caches, whose memory stays where it is."""
    model = random_model(KINDS[kind]).double().eval()
    called = filled(model)
    step = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))
    places = [t.data_ptr() for cache in step.caches for t in written(cache)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(VOCAB, (len(PROMPTS),), generator=generator)
        step.tokens.copy_(tokens)
        assert_exact("logits", step(), next_logits(model, tokens[:, None], called))
    assert places == [t.data_ptr() for cache in step.caches for t in written(cache)]
    for mine, theirs in zip(step.caches, called, strict=True):
        for a, b in zip(written(mine), written(theirs), strict=True):
            assert_exact("cache", a.double(), b.double())


@pytest.mark.parametrize("kind", ["kimi", "qwen", "mla"])
def test_turns_of_a_chat_share_their_caches(kind):
    """Prompts and answers follow each other in the caches that the steps were given."""
    model = random_model(MODELS[kind]).double().eval()
    tokens = torch.randint(VOCAB, (2, 45), generator=torch.Generator().manual_seed(2))
    whole, caches = make_caches(model, 2, 45), make_caches(model, 2, 45)
    next_logits(model, tokens[:, :20], caches)
    step = DecodeStep(model, caches, 2)
    for i in range(20, 45):
        if i in (26, 35):  # the next prompt
            logits = next_logits(model, tokens[:, i : i + 3], caches)
        elif i not in (27, 28, 36, 37):
            step.tokens.copy_(tokens[:, i])
            logits = step()
        if i in (25, 26, 34, 35, 44):
            read = i + 3 if i in (26, 35) else i + 1
            exact = next_logits(model, tokens[:, :read], make_caches(model, 2, 45))
            assert_exact(f"logits of token {i}", logits, exact)
    next_logits(model, tokens, whole)
    for mine, theirs in zip(caches, whole, strict=True):
        for a, b in zip(written(mine), written(theirs), strict=True):
            assert_exact("cache", a.double(), b.double())


@pytest.mark.parametrize("kind", ["kimi", "qwen", "gla", "gdp"])
def test_plain_layers_are_joined(kind):
    model = random_model(KINDS.get(kind) or MODELS[kind])
    step = DecodeStep(model, filled(model), len(PROMPTS))
    for block in step.blocks:
        attention = not hasattr(block.block.mixer, "core")
        assert (block.mixer is None) == attention
        assert block.ffn is not None


def test_watched_modules_are_called():
    """A hook sees every call; the result is the same."""
    model, seen = random_model(MODELS["kda"]).double().eval(), []
    called = filled(model)
    for block in model.blocks:
        block.mixer.q_proj.register_forward_hook(lambda *_: seen.append("q"))
        block.ffn.up.register_forward_hook(lambda *_: seen.append("up"))
    step = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))
    seen.clear()
    y = step()
    assert sorted(seen) == ["q"] * 3 + ["up"] * 3
    assert_exact("logits", y, next_logits(model, step.tokens[:, None], called))


NORMS = "norm", "blocks.0.mixer_norm", "blocks.0.ffn_norm"
LINEAR = "head", "blocks.0.mixer.o_proj", "blocks.0.mixer.g_proj.1", "blocks.1.ffn.down"


@pytest.mark.parametrize("place, change", [
    *((place, change) for place in NORMS for change in ("hooked", "hooked_before")),
    *((place, change) for place in LINEAR for change in CHANGES),
])  # fmt: skip
def test_what_is_not_plain_is_called(place, change):
    """A step computes what hooks, adapters and biases change, and no graph skips the hooks."""
    model = random_model(MODELS["kda"]).double().eval()
    called = filled(model)
    before = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))()
    parent, _, name = place.rpartition(".")
    CHANGES[change](model.get_submodule(parent), name)
    step = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))
    y, wanted = step(), next_logits(model, step.tokens[:, None], called)
    assert (wanted - before).norm() > 1e-3 * before.norm()
    assert_exact("logits", y, wanted)
    assert ("hooks" in why_eager(model)) == change.startswith("hooked")


@pytest.mark.parametrize("kind", ["kimi-experts", "qwen-experts", "kda"])
def test_a_quantised_model_generates(kind):
    """Its linear layers have no tensor called weight. Steps are calls of its modules."""
    exact = random_model(KINDS[kind]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated (torch 2.10 to 2.13)
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(exact), {torch.nn.Linear})
    called = filled(model)
    step = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))
    step.tokens.copy_(torch.tensor([3, 60, 9]))
    y, full = step(), next_logits(exact, step.tokens[:, None], filled(exact))
    wanted = next_logits(model, step.tokens[:, None], called)
    torch.testing.assert_close(y, wanted, atol=1e-3, rtol=1e-3)
    assert (y - full).norm() < 0.2 * full.norm()
    found, _ = generate(model, PROMPTS, 4)
    assert [len(tokens) for tokens in found] == [4] * 3


def test_a_norm_without_a_weight_is_called():
    model = random_model(MODELS["kda"]).double().eval()
    model.norm = torch.nn.RMSNorm(32, elementwise_affine=False)
    called = filled(model)
    step = DecodeStep(model, copy.deepcopy(called), len(PROMPTS))
    assert_exact("logits", step(), next_logits(model, step.tokens[:, None], called))


def test_weights_move_once_and_keep_their_values():
    model = random_model(MODELS["kda"])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    block = model.blocks[0]
    into = RecurrentStep(block.mixer, block.mixer_norm).into
    both = SwiGLUStep(block.ffn, block.ffn_norm).into
    place = into.data_ptr(), both.data_ptr()
    assert place == (block.mixer.q_proj.weight.data_ptr(), block.ffn.gate.weight.data_ptr())
    again = RecurrentStep(block.mixer, block.mixer_norm), SwiGLUStep(block.ffn, block.ffn_norm)
    assert place == tuple(step.into.data_ptr() for step in again)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    with torch.no_grad():
        block.mixer.k_proj.weight.fill_(3.0)
    assert (into[0, 32:64] == 3).all()
    parts = torch.randn(4, 3), torch.randn(2, 3)
    wanted = torch.cat(parts)
    assert torch.equal(stacked(parts), wanted) and torch.equal(torch.cat(parts), wanted)


class NoReads(TorchDispatchMode):
    """Refuses operations whose shapes or results the host has to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), name
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["kimi", "qwen", "gdp", "comba"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_on_kernels_never_waits(kind, rows, monkeypatch):
    """Interpreted kernels; products of one and of several sequences. Logits are those of the torch
    stages."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    flags = (KINDS.get(kind) or MODELS[kind]) + " --impl"
    plain = random_model(f"{flags} torch").eval()
    model = random_model(f"{flags} triton").eval()
    exact = copy.deepcopy(plain).double()
    tokens, found = torch.arange(3 * rows).view(rows, 3) % VOCAB, []
    for each, impl in ((model, "triton"), (plain, "torch"), (exact, "torch")):
        caches = make_caches(each, rows, 8)
        next_logits(each, tokens, caches)
        step = DecodeStep(each, caches, rows, impl)
        step.tokens.copy_(tokens[:, 0])
        with NoReads() if each is model else torch.no_grad():
            step()
            found.append(step())
    assert_within_budget("logits", *(found[i] for i in (0, 2, 1)), factor=8.0)


@pytest.mark.parametrize("rows, layer", [
    (1, ["step_product", "step_product", "step_mixer", *["step_product"] * 3]),
    (5, ["norm", "conv_update", "recurrent", "gated_norm", "norm", "swiglu"]),
])  # fmt: skip
def test_kernels_of_a_step(rows, layer, monkeypatch):
    """Projections, low ranks, mixer, output, gate with up, and down; then the head. For several
    rows what stands around the products of cuBLAS."""
    pytest.importorskip("triton")
    from fla_cp.kernels.triton.launch import redirected

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = random_model(MODELS["kda"] + " --impl triton").eval()
    caches, names = make_caches(model, rows, 8), []
    next_logits(model, torch.arange(2 * rows).view(rows, 2), caches)
    step = DecodeStep(model, caches, rows, "triton")

    def run(kernel, grid, *given, **named):
        names.append(kernel.__name__.removesuffix("_kernel"))
        kernel[grid](*given)

    with redirected(run):
        step()
    assert names == [*(layer * 3), layer[0]]


def test_a_step_casts_no_parameters_for_a_mixer():
    """A mixer reads its parameters early. If they have to be cast, modules are called."""
    block = random_model(MODELS["kda"]).blocks[0]
    rules = [RecurrentStep(block.mixer, block.mixer_norm).rule]
    for part in (block.mixer.core, block.mixer.qkv_conv):
        part.to(torch.bfloat16)
        rules.append(RecurrentStep(block.mixer, block.mixer_norm).rule)
        part.float()
    block.mixer.qkv_conv = ShortConvolution(len(block.mixer.qkv_conv.weight), bias=True)
    rules.append(RecurrentStep(block.mixer, block.mixer_norm).rule)
    assert rules[0] is not None and rules[1:3] == [None, None] and rules[3] is not None
    block.mixer.qkv_conv.bias.data = block.mixer.qkv_conv.bias.data.bfloat16()
    assert RecurrentStep(block.mixer, block.mixer_norm).rule is None


class WeakBeta(GatedDeltaNet):
    def operands(self, q, k, v, g, beta):
        return super().operands(q, k, v, g, beta - 3.0)


class HalfGated(GatedDeltaNet):
    def gated(self, o, project, early):
        return super().gated(o, project, early) / 2


@pytest.mark.parametrize("layer_class", [GatedDeltaNet, WeakBeta, HalfGated])
def test_a_step_does_what_a_class_overrides(layer_class):
    """A step computes what the layer's own methods do, or leaves the layer to its call."""
    torch.manual_seed(0)
    layer, norm = layer_class(32, 2, 16).double().eval(), torch.nn.RMSNorm(32).double()
    x, cache = torch.randn(2, 3, 32, dtype=torch.float64), layer.make_cache(2, 3)
    with torch.no_grad():
        layer(norm(x[:, :2]), cache=cache)
        same, y = copy.deepcopy(cache), x[:, 2].clone()
        wanted = y + layer(norm(x[:, 2:]), cache=cache)[:, 0]
        if not RecurrentStep.fits(layer, norm):
            assert layer_class is HalfGated
            return
        step = RecurrentStep(layer, norm)
        step(y, same)
    assert (step.rule is None) == (layer_class is WeakBeta)
    assert_exact("x", y, wanted)


def test_bytes_of_a_step_are_those_of_its_parts():
    """By hand: three layers, hidden size 32, 2 heads of 16, tied embeddings."""
    model, rows = random_model(MODELS["kda"] + " --model.tie-embeddings True"), 3
    caches = filled(model)
    ffn, hidden = 3 * 32 * 128, 32
    mixer = 4 * 32 * 32 + 2 * (32 * 16 + 16 * 32) + 2 * 32  # projections, low ranks, beta
    mixer += 96 * 4 + 2 + 32 + 16  # convolution, A_log, dt_bias, norm of o
    weights = 3 * (ffn + mixer + 2 * hidden) + hidden + VOCAB * hidden
    state, window = 2 * 16 * 16, 96 * 4
    assert step_bytes(model, caches, rows) == 4 * (weights + 2 * 3 * rows * (state + window))
    read = step_bytes(model, caches, rows, written=False)
    assert read == 4 * (weights + 3 * rows * (state + window))
    untied = random_model(MODELS["kda"] + " --model.tie-embeddings False")
    more = step_bytes(untied, filled(untied), rows) - step_bytes(model, caches, rows)
    assert more == 4 * rows * hidden  # a row of the embedding for each token


def test_bytes_of_attention_and_of_experts():
    dense, mixed = random_model(MODELS["qwen"]), random_model(MODELS["qwen-experts"])
    (_, attention, _) = caches = make_caches(dense, 2, 10)
    few, many = (step_bytes(dense, make_caches(dense, 2, n), 2) for n in (10, 30))
    assert many == few + 2 * (attention.keys.nbytes + attention.values.nbytes)
    assert few == step_bytes(dense, caches, 2)
    experts = sum(p.nbytes for layer in mixed.expert_layers() for p in layer.experts.parameters())
    one, all_taken = (step_bytes(mixed, [], rows) for rows in (1, 2))
    row = mixed.embedding.weight[0].nbytes
    assert all_taken - one == experts // 2 + row  # 3 of 6 experts, then all


def test_without_a_gpu_no_graph_is_made():
    model = random_model(MODELS["kda"])
    assert why_eager(model) == "only GPUs have CUDA graphs"
    calls = []
    replayed = Replayed(lambda: calls.append(1) or torch.zeros(1), torch.device("cpu"), False)
    for _ in range(5):
        replayed()
    assert len(calls) == 5 and replayed.graph is None


def test_draws_follow_the_seed():
    from fla_cp.train.generate import Sampling

    model = random_model(MODELS["kimi"]).eval()
    drawn = [
        generate(model, PROMPTS, 6, sampling=Sampling(1.0, 0.9), seed=seed)[0] for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_capture_meets_no_garbage(monkeypatch):
    """A graph that is destroyed while another one is captured would end that capture. One that only
    refers to itself is destroyed before, and one that is lost meanwhile afterwards."""

    class Lost:
        def __init__(self):
            self.me = self

    gc.disable()
    before, meanwhile = weakref.ref(Lost()), []
    gc.enable()

    def step():
        assert before() is None and not gc.isenabled()
        meanwhile.append(weakref.ref(Lost()))
        return torch.zeros(1)

    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    replayed = Replayed(step, torch.device("cpu"), True)
    replayed._capture()
    assert meanwhile[0]() is not None and gc.isenabled()


@pytest.mark.parametrize("prompt", [3, 70])
def test_a_graph_is_made_anew_where_a_prompt_moved_the_states(prompt, monkeypatch):
    """A replay uses the memory that the graph was captured with. A stand-in for graphs checks that
    the states are still there."""
    graphs = []

    class Graph:
        def __init__(self):
            graphs.append(self)

        def replay(self):
            assert step.places() == self.places
            kept.copy_(step())

    class Capture(nullcontext):
        def __exit__(self, *error):
            graphs[-1].places = step.places()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: Capture())
    model = random_model(MODELS["kimi"]).double().eval()
    caches = make_caches(model, 1, 200)
    next_logits(model, torch.arange(5)[None], caches)
    step, kept = DecodeStep(model, caches, 1), torch.zeros(1, VOCAB, dtype=torch.float64)
    recorded = Replayed(lambda: kept, torch.device("cpu"), True, step.places)
    recorded._eager = step  # without a stream
    for _ in range(5):
        recorded()
    assert len(graphs) == 1
    next_logits(model, torch.arange(prompt)[None], caches)
    wanted = next_logits(model, step.tokens[:, None], copy.deepcopy(caches))
    assert_exact("logits", recorded(), wanted)
    for _ in range(3):
        recorded()
    assert len(graphs) == 2
