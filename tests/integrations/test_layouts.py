"""Layouts of published models: the names, shapes and options that the published files have."""

import math

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

import transformers

from fla_cp.integrations.layouts import layout_of
from fla_cp.integrations.layouts.table import Run, Table
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import parse

KIMI, QWEN = "--model kimi-linear", "--model qwen3-next"


def meta(flags, vocab):
    with torch.device("meta"):
        return Decoder(parse(flags.split()).model, vocab)


def published_model(layout):
    """The stock model of a layout's configuration, on the meta device."""
    config = transformers.CONFIG_MAPPING[layout.model_type].from_dict(dict(layout.config))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "flags, vocab, shapes",
    [
        (
            KIMI,
            163840,
            {
                "model.embed_tokens.weight": (163840, 2304),
                "model.layers.0.mlp.gate_proj.weight": (9216, 2304),
                "model.layers.0.self_attn.q_conv1d.weight": (4096, 1, 4),
                "model.layers.0.self_attn.A_log": (1, 1, 32, 1),
                "model.layers.0.self_attn.dt_bias": (4096,),
                "model.layers.0.self_attn.f_a_proj.weight": (128, 2304),
                "model.layers.0.self_attn.g_b_proj.weight": (4096, 128),
                "model.layers.3.self_attn.q_proj.weight": (6144, 2304),
                "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 2304),
                "model.layers.3.self_attn.kv_b_proj.weight": (8192, 512),
                "model.layers.26.self_attn.kv_a_layernorm.weight": (512,),
                "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": (256,),
                "model.layers.1.block_sparse_moe.experts.255.w2.weight": (2304, 1024),
                "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight": (1024, 2304),
                "lm_head.weight": (163840, 2304),
            },
        ),
        (
            QWEN,
            151936,
            {
                "model.layers.0.linear_attn.in_proj_qkvz.weight": (12288, 2048),
                "model.layers.0.linear_attn.in_proj_ba.weight": (64, 2048),
                "model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
                "model.layers.0.linear_attn.A_log": (32,),
                "model.layers.0.linear_attn.norm.weight": (128,),
                "model.layers.0.linear_attn.out_proj.weight": (2048, 4096),
                "model.layers.3.self_attn.q_proj.weight": (8192, 2048),
                "model.layers.3.self_attn.k_proj.weight": (512, 2048),
                "model.layers.3.self_attn.q_norm.weight": (256,),
                "model.layers.47.mlp.experts.511.gate_proj.weight": (512, 2048),
                "model.layers.47.mlp.shared_expert.down_proj.weight": (2048, 512),
                "model.layers.47.mlp.shared_expert_gate.weight": (1, 2048),
                "lm_head.weight": (151936, 2048),
            },
        ),
    ],
    ids=["kimi-linear", "qwen3-next"],
)
def test_named_sizes_are_the_published_models(flags, vocab, shapes):
    layout = layout_of(meta(flags, vocab))
    for name, shape in shapes.items():
        assert layout.tensors[name].shape == shape, name
    stock = published_model(layout)
    state = stock.state_dict()
    total = sum(math.prod(published.shape) for published in layout.tensors.values())
    assert total == sum(x.numel() for x in state.values())
    untouched = {name for name in state if ".layers." not in name}
    assert untouched == {name for name in layout.tensors if ".layers." not in name}


def test_options_of_the_published_kimi_linear():
    config = published_model(layout_of(meta(KIMI, 163840))).config
    default = transformers.KimiLinearConfig()  # the published values, but for the order of layers
    for name in transformers.KimiLinearConfig.__annotations__:
        if name not in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id"):
            assert getattr(config, name) == getattr(default, name), name
    full = [i for i, kind in enumerate(config.layer_types, 1) if kind == "full_attention"]
    assert full == [4, 8, 12, 16, 20, 24, 27]


def test_options_of_the_published_qwen3_next():
    config = published_model(layout_of(meta(QWEN, 151936))).config
    default = transformers.Qwen3NextConfig(rope_parameters={"rope_theta": 1e7})
    # every block has experts, so there is no dense one whose width would count
    for name in set(transformers.Qwen3NextConfig.__annotations__) - {"intermediate_size"}:
        assert getattr(config, name) == getattr(default, name), name


SMALL = "--model.layers 2 --model.hidden-size 8 --model.num-heads 2 --model.head-dim 4 "


def numbered(flags):
    """A decoder in which the value of an element says which one it is."""
    model = build_model(parse((SMALL + flags).split()).model, 5, 0)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.arange(x.numel()).view(x.shape))
    return model


def test_rows_of_a_key_head_are_together_in_qwen3_next():
    model = numbered("--mixer gdn")
    layout, state = layout_of(model), model.state_dict()
    found = layout.assembled("model.layers.0.linear_attn.in_proj_qkvz.weight", state.get)
    q, k, v, z = (state[f"blocks.0.mixer.{p}_proj.weight"] for p in "qkvg")
    second = [x[4:] for x in (q, k, v, z)]  # the rows of the second head
    assert torch.equal(found, torch.cat([q[:4], k[:4], v[:4], z[:4], *second]))
    ba = layout.assembled("model.layers.0.linear_attn.in_proj_ba.weight", state.get)
    b, a = (state[f"blocks.0.mixer.{p}_proj.weight"] for p in "ba")
    assert torch.equal(ba, torch.stack([b[0], a[0], b[1], a[1]]))
    norm = layout.assembled("model.layers.0.input_layernorm.weight", state.get)
    assert torch.equal(norm, torch.arange(8) - 1.0)


def test_a_tensor_without_a_place_is_refused():
    model = numbered("--mixer mla")
    model.blocks[1].mixer.kv_up.bias = torch.nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match=r"no tensor for blocks\.1\.mixer\.kv_up\.bias of the"):
        layout_of(model)


def test_a_table_with_a_gap_is_a_mistake():
    table = Table("x", torch.nn.Linear(3, 4, bias=False))
    table.add("upper", Run("weight", 0, 1), shape=(1, 3))
    table.add("lower", Run("weight", 2, 2), shape=(2, 3))
    with pytest.raises(AssertionError):
        table.tensors()


def swap_ffn(model):
    first, second = model.blocks
    first.ffn, second.ffn = second.ffn, first.ffn


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: setattr(m.blocks[0].mixer_norm, "eps", 1e-3), "all norms must have the same"),
        (lambda m: setattr(m.blocks[1].mixer, "rotary", None), "of block 1 must have rotary"),
        (lambda m: setattr(m.blocks[1].mixer, "g_proj", None), "must have an output_gate"),
        (lambda m: setattr(m.blocks[1].mixer, "q_norm", None), "must have norms of q and k"),
        (lambda m: setattr(m.blocks[0].mixer, "allow_neg_eigval", True), "have beta below 1"),
        (swap_ffn, "the blocks without experts must be the first ones, got .0."),
    ],
)
def test_what_qwen3_next_lacks_is_refused(change, reason):
    experts = "--model.experts 2 --model.shared-experts 1 --model.dense-layers 1"
    model = numbered(f"--model.pattern gdn,attention {experts}")
    change(model)
    with pytest.raises(ValueError, match=f"to be stored as Qwen3-Next, .*{reason}"):
        layout_of(model)


def test_what_kimi_linear_lacks_is_refused():
    for change, reason in (
        (lambda m: setattr(m.kv_norm, "eps", 1e-5), "eps=1e-06 in its norm of latents, got 1e-05"),
        (lambda m: setattr(m, "q_proj", torch.nn.Sequential(m.q_proj)), "plain projection of q"),
    ):
        model = numbered("--mixer mla")
        change(model.blocks[1].mixer)
        with pytest.raises(
            ValueError, match=f"MultiHeadLatentAttention of block 1 must .*{reason}"
        ):
            layout_of(model)
