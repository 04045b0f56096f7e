"""Hybrids: patterns on the command line, named sizes, and documents that see nothing of others."""

import shutil

import pytest
import torch

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.nn import Attention, GatedDeltaNet, KimiDeltaAttention, MultiHeadLatentAttention
from fla_cp.train.config import UserError
from fla_cp.train.main import main
from fla_cp.train.metrics import read_metrics
from fla_cp.train.model import Decoder, build_model, compile_blocks
from fla_cp.train.parse import load_toml, parse, to_toml
from fla_cp.train.pattern import block_mixers, parse_pattern
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads

SMALL = (
    "--model.layers 3 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 --impl torch "
)


def model_of(flags, dtype=torch.float64):
    return build_model(parse((SMALL + flags).split()).model, 64, 0).to(dtype)


def test_a_pattern_repeats_over_the_blocks():
    assert parse_pattern("kda*3, mla") == ("kda", "kda", "kda", "mla")
    assert block_mixers("kda*2,mla", 7) == ("kda", "kda", "mla", "kda", "kda", "mla", "kda")
    kinds = [type(block.mixer) for block in model_of("--model.pattern gdn,attention").blocks]
    assert kinds == [GatedDeltaNet, Attention, GatedDeltaNet]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--model.pattern kda,mlaa", "'mlaa' in 'kda,mlaa' must be a mixer: kda, gdn, .*, mla"),
        ("--model.pattern kda,", "'' in 'kda,' must be a mixer"),
        ("--model.pattern kda*0,mla", r"'kda\*0' in .* must be kda\*COUNT, COUNT from 1"),
        ("--model.pattern kda*x", r"'kda\*x' in 'kda\*x' must be kda\*COUNT"),
        ("--model.pattern kda,mla --mixer gdn", "left out beside --mixer gdn, got kda,mla"),
        ("--mixer attention --model.head-dim 1", "at least 2 with attention, got 1"),
        ("--model.rope-theta 1", "--model.rope-theta must be above 1, got 1.0"),
        ("--model.norm-eps 0", "--model.norm-eps must be above 0, got 0.0"),
        ("--model.rope-scaling ntk:4", "must be yarn:FACTOR or yarn:FACTOR:ORIGINAL, got 'ntk:4'"),
        ("--model.rope-scaling yarn:x", "must be yarn:FACTOR or yarn:FACTOR:ORIGINAL"),
        ("--model.rope-scaling yarn:0.5", "must have a FACTOR from 1, got 'yarn:0.5'"),
        ("--model.rope-scaling yarn:2:0", "must have an ORIGINAL from 1, got 'yarn:2:0'"),
    ],
)
def test_bad_flags_name_what_is_wrong(flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags.split())


@pytest.mark.parametrize(
    "flags, bias",
    [
        ("--model.pattern kda*3,mla", False),
        ("--model kimi-linear --model.experts 0", False),
        ("--model.pattern kda*3,mla --model.gate-bias True", True),
        ("--model.pattern kda,attention", True),
        ("", True),
        ("--mixer kda --model.gate-bias False", False),
    ],
)
def test_kda_has_no_gate_bias_beside_mla(flags, bias):
    model = model_of(flags + " --model.layers 1")
    assert (model.blocks[0].mixer.g_proj[1].bias is not None) == bias


def test_eps_of_all_norms_but_that_of_latents():
    model = model_of("--model.pattern gdn,attention,mla --model.norm-eps 1e-3")
    eps = {name: m.eps for name, m in model.named_modules() if hasattr(m, "eps")}
    assert eps.pop("blocks.2.mixer.kv_norm") == 1e-6
    assert len(eps) == 10 and set(eps.values()) == {1e-3}
    with torch.device("meta"):
        named = [Decoder(parse(["--model", size]).model, 64) for size in ("340M", "qwen3-next")]
    assert [model.norm.eps for model in named] == [1e-5, 1e-6]


def test_a_hybrid_survives_toml(tmp_path):
    flags = ["--model.pattern", "kda*3,mla", "--model.rope-scaling", "yarn:4", "--seq-len", "8192"]
    config = parse(flags)
    assert (config.model.mixer, config.model.rope_scaling) == (None, "yarn:4:2048")
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_toml(tmp_path / "config.toml") == config


def test_kimi_linear_has_the_published_layers():
    with torch.device("meta"):
        model = Decoder(parse(["--model", "kimi-linear"]).model, 163840)
    latent = [i for i, b in enumerate(model.blocks, 1) if not hasattr(b.mixer, "core")]
    assert (len(model.blocks), latent) == (27, [4, 8, 12, 16, 20, 24, 27])
    kda, mla = model.blocks[0], model.blocks[3].mixer
    assert isinstance(kda.mixer, KimiDeltaAttention)
    assert isinstance(mla, MultiHeadLatentAttention)
    assert kda.mixer.q_proj.weight.shape == (32 * 128, 2304)
    assert kda.ffn.up.weight.shape == (9216, 2304)
    experts = model.blocks[1].ffn
    assert len(model.expert_layers()) == 26
    assert experts.experts.down.shape == (256, 2304, 1024)
    assert experts.shared.up.weight.shape == (1024, 2304) and experts.shared_gate is None
    router = experts.router
    assert (router.routing, router.experts_per_token, router.scale) == ("sigmoid", 8, 2.446)
    assert mla.kv_down.weight.shape == (512 + 64, 2304)
    assert mla.kv_up.weight.shape == (32 * (128 + 128), 512)
    assert mla.q_proj.weight.shape == (32 * (128 + 64), 2304)
    assert mla.rotary is None


def test_qwen3_next_has_the_published_layers():
    with torch.device("meta"):
        model = Decoder(parse(["--model", "qwen3-next"]).model, 151936)
    full = [i for i, b in enumerate(model.blocks) if isinstance(b.mixer, Attention)]
    assert (len(model.blocks), full) == (48, list(range(3, 48, 4)))
    gdn, attention = model.blocks[0], model.blocks[3].mixer
    assert gdn.mixer.q_proj.weight.shape == (16 * 128, 2048)
    assert gdn.mixer.v_proj.weight.shape == (32 * 128, 2048)
    assert len(model.expert_layers()) == 48
    assert gdn.ffn.experts.down.shape == (512, 2048, 512)
    assert gdn.ffn.shared.up.weight.shape == (512, 2048) and gdn.ffn.shared_gate is not None
    router = gdn.ffn.router
    assert (router.routing, router.experts_per_token, router.scale) == ("softmax", 10, 1.0)
    assert attention.q_proj.weight.shape == attention.g_proj.weight.shape == (16 * 256, 2048)
    assert attention.k_proj.weight.shape == (2 * 256, 2048)
    assert (attention.rotary.dim, attention.rotary.base) == (64, 1e7)


PUBLISHED = {
    "kimi-linear": ("KimiLinearConfig", 48e9, 3e9),
    "qwen3-next": ("Qwen3NextConfig", 80e9, 3e9),
}
"""The class of the published configuration, and the parameters of which the names tell: all, and
those that a token meets."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_named_hybrids_have_the_published_parameters(size):
    transformers = pytest.importorskip("transformers")
    name, total, active = PUBLISHED[size]
    config = getattr(transformers, name, type(None))()
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
        model = Decoder(parse(["--model", size]).model, config.vocab_size)
    found = sum(p.numel() for p in model.parameters())
    # of Kimi Linear's layers their defaults make six latent attention, the published model seven
    assert found == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=1e-3)
    assert found == pytest.approx(total, rel=0.03)
    # the names count neither embedding nor head, and round to billions
    body = model.active_parameters() - 2 * model.embedding.weight.numel()
    assert round(body / 1e9) * 1e9 == active


def test_small_hybrids_train_and_sizes_may_go_without_experts():
    for size, pattern in (("kimi-linear-small", "kda*3,mla"), ("qwen3-next-small", None)):
        sizes = [*("--model", size), *("--model.layers", "4"), *("--model.hidden-size", "32")]
        sizes += ["--model.num-heads", "2", "--model.head-dim", "16", "--impl", "torch"]
        config = parse(sizes).model
        assert config.pattern == (pattern or "gdn*3,attention")
        model = build_model(config, 64, 0)
        context = build_cp_context(torch.tensor([0, 40]), None, conv1d_kernel_size=4)
        tokens = torch.arange(40)[None] % 64
        model(tokens, context, tokens).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model.expert_layers()
        assert model.active_parameters() < sum(p.numel() for p in model.parameters())
        dense = model_of(f"--model {size} --model.experts 0", torch.float32)
        assert not dense.expert_layers() and dense.balance is None


def test_options_of_positions_reach_the_layers():
    flags = "--model.pattern attention,mla --model.rope-theta 5e5 --model.rope-scaling yarn:4:1024"
    blocks = model_of(flags + " --model.mla-rope").blocks
    for block in blocks:
        rotary = block.mixer.rotary
        assert (rotary.base, rotary.scaling.factor, rotary.scaling.original_length) == (
            5e5,
            4,
            1024,
        )
    assert model_of(flags).blocks[1].mixer.rotary is None


def logits(group, rank, model, batches):
    """Of the tokens from 61 on."""
    R, T = group.size(), len(batches[0])
    context = build_cp_context(
        torch.tensor([0, 61, T]),
        group,
        conv1d_kernel_size=4,
        token_ranges=zigzag_token_ranges(T, R),
    )
    found = (model(context.shard(tokens[None]), context) for tokens in batches)
    return [context.unshard(y).detach()[:, 61:] for y in found]


EXPERTS = "--model.experts 32 --model.experts-per-token 4 --model.shared-experts 1"


@pytest.mark.bits
@pytest.mark.parametrize(
    "flags",
    [
        "--model.pattern kda,mla,attention --model.mla-rope",
        "--model.pattern gdn,attention",
        f"--model.pattern kda,mla {EXPERTS} --model.routing sigmoid",
        f"--model.pattern gdn,attention {EXPERTS}",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_document_does_not_see_the_one_before(flags, dtype):
    """Nor which experts its tokens take."""
    model = model_of(flags, dtype)
    tokens = torch.arange(150) % 64
    changed = torch.where(torch.arange(150) < 61, (7 * tokens + 3) % 64, tokens)
    for a, b in run_threads(logits, 4, model, [tokens, changed]):
        assert torch.equal(a, b)


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_recomputed_blocks_have_the_same_gradients(remat):
    tokens = torch.arange(100)[None] % 64
    context = build_cp_context(torch.tensor([0, 30, 100]), None, conv1d_kernel_size=4)
    found = []
    for mode in ("none", remat):
        model = model_of(f"--model.pattern kda,mla,attention --remat {mode}")
        model(tokens, context, tokens).backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert_exact(remat, b, a)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of a block's input
def test_compiled_blocks_give_the_same(monkeypatch):
    """Each block is one graph, whatever its mixer."""
    torch._dynamo.reset()
    original, fullgraph = torch.compile, []

    def compiled(function, **options):
        fullgraph.append(options["fullgraph"])
        return original(function, backend="aot_eager", **options)

    models = [model_of("--model.layers 4 --model.pattern kda,mla,attention,gdp") for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        compile_blocks(models[1])
    assert fullgraph == [True] * 4
    for documents in ([0, 30, 100], [0, 10, 11, 100]):
        context = build_cp_context(torch.tensor(documents), None, conv1d_kernel_size=4)
        tokens = torch.arange(100)[None] % 64
        for model in models:
            model.zero_grad()
            model(tokens, context, tokens).backward()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert_exact("gradient", b.grad, a.grad)


def losses(run, *flags):
    model = ["--model.pattern", "kda,attention,mla", *SMALL.split()]
    data = ["--data", "synthetic", "--seq-len", "64", "--global-batch-size", "1"]
    run_flags = ["--out", str(run), "--eval-every", "0", "--tracker", "none"]
    assert main([*model, *data, *run_flags, "--device", "cpu", "--lr", "0.01", *flags]) == 0
    return [row["loss"] for row in read_metrics(run)]


@pytest.mark.bits
def test_a_resumed_hybrid_goes_on_alike(tmp_path):
    flags = ["--max-steps", "4", "--checkpoint-every", "2"]
    whole = losses(tmp_path / "whole", *flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "halved")
    shutil.rmtree(tmp_path / "halved" / "checkpoints" / "step-00000004")
    assert losses(tmp_path / "halved", *flags, "--resume", "auto") == whole
    assert len(whole) == 4
