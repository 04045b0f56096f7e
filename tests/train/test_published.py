"""Folders of Hugging Face models in fla-cp-generate: the same greedy text as transformers."""

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fla_cp.integrations import safetensors_folder
from fla_cp.train import checkpoint
from fla_cp.train.config import UserError
from fla_cp.train.evaluate import main as evaluate_main
from fla_cp.train.generate import generate, load
from fla_cp.train.generate import main as generate_main
from fla_cp.train.parse import parse
from fla_cp.train.published import load_published, open_published, why_not_read
from tests.support.exported import VOCAB, logits_of
from tests.support.stock_folders import TAKEN, save_stock
from tests.support.tokenizers import save_tokenizer

PROMPTS = [[5, 17, 80, 3, 41, 9, 60], [7], [int(i * 31 % 97) for i in range(83)]]
NEW = 24
NEAR = 1e-4
"""Logits that differ by less are a near-tie, which rounding decides."""

KIMI = {
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 64,
    "num_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-4,
}
QWEN = TAKEN | {"num_experts": 6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.25,
}
FOLDERS = {
    "kimi": ("kimi_linear", KIMI),
    "kimi-dense": ("kimi_linear", KIMI | {"mlp_layer_types": ["dense", "dense", "sparse"]}),
    "qwen": ("qwen3_next", QWEN),
    "qwen-dense": (
        "qwen3_next",
        QWEN | {"mlp_only_layers": [0], "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    ),
    "qwen-width": (
        "qwen3_next",
        QWEN | {"mlp_only_layers": [0], "hidden_size": 224, "intermediate_size": 1856},
    ),
    "qwen-yarn": ("qwen3_next", QWEN | {"rope_parameters": YARN, "max_position_embeddings": 64}),
}
"""Models that our decoder expresses, as transformers makes and writes them."""
LINEAR, FULL = ({"layer_types": [kind] * 3} for kind in ("linear_attention", "full_attention"))
PARTS = {
    "kimi-no-experts": ("kimi_linear", KIMI | {"mlp_layer_types": ["dense"] * 3}),
    "kimi-linear": ("kimi_linear", KIMI | LINEAR | {"num_attention_heads": 2, "kv_lora_rank": 7}),
    "kimi-full": ("kimi_linear", KIMI | FULL | {"linear_num_heads": 32, "linear_head_dim": 128}),
    "qwen-no-experts": ("qwen3_next", QWEN | {"num_experts": 0, "norm_topk_prob": False}),
    "qwen-no-experts-by-layer": ("qwen3_next", QWEN | {"mlp_only_layers": [2, 0, 1]}),
    "qwen-linear": ("qwen3_next", QWEN | LINEAR | {"num_attention_heads": 2, "head_dim": 6}),
    "qwen-full": ("qwen3_next", QWEN | FULL),
}
"""The same without some kind of layers, whose options then say nothing."""


def saved(folder, kind):
    name, changes = (FOLDERS | PARTS)[kind]
    save_stock(folder, name, **changes)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("kind", FOLDERS)
def test_greedy_text_is_that_of_transformers(kind, tmp_path):
    stock = saved(tmp_path, kind)
    model, tokenizer, ends = load(tmp_path, torch.device("cpu"))
    assert tokenizer is None
    assert ends == [2]
    found, _ = generate(model, PROMPTS, NEW, end=ends, chunk=31)
    compared = 0
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        theirs = stock.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        wanted = theirs.sequences[0, len(prompt) :].tolist()
        best = torch.cat(theirs.logits).topk(2, -1).values
        near = (best[:, 0] - best[:, 1] < NEAR).tolist()
        sure = near.index(True) if True in near else len(wanted)
        assert tokens[:sure] == wanted[:sure]
        if sure == len(wanted):
            assert tokens == wanted
        compared += sure
    assert compared > NEW  # not all of them near-ties


@pytest.mark.parametrize("kind", FOLDERS | PARTS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    stock = saved(tmp_path, kind)
    model = load_published(tmp_path, torch.device("cpu"))
    tokens = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        wanted = stock(tokens, use_cache=False).logits
    torch.testing.assert_close(logits_of(model, tokens), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, changes, reason",
    [
        ("kimi_linear", KIMI | {"kv_lora_rank": 16}, r"kv_lora_rank .* 4 \* linear_head_dim"),
        ("kimi_linear", KIMI | {"v_head_dim": 12}, "v_head_dim .* linear_head_dim, 8"),
        ("kimi_linear", KIMI | {"linear_num_heads": 2}, "num_attention_heads .* 2 .* got 4"),
        ("kimi_linear", KIMI | {"intermediate_size": 48}, "intermediate_size .* multiple of 64"),
        ("kimi_linear", KIMI | {"q_lora_rank": 8}, "q_lora_rank .* None"),
        ("qwen3_next", QWEN | {"linear_value_head_dim": 12}, "linear_value_head_dim .* got 12"),
        (
            "qwen3_next",
            QWEN | {"linear_conv_kernel_dim": 3},
            "linear_conv_kernel_dim .* 4 .* got 3",
        ),
        ("qwen3_next", QWEN | {"head_dim": 12}, "head_dim .* multiple of linear_key_head_dim, 8"),
        (
            "qwen3_next",
            QWEN | {"hidden_act": "gelu"},
            "hidden_act .* 'silu' for fla_cp's decoder, got 'gelu'",
        ),
        ("qwen3_next", QWEN | {"norm_topk_prob": False}, "norm_topk_prob"),
        (
            "qwen3_next",
            QWEN | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters .* default or yarn",
        ),
        (
            "qwen3_next",
            QWEN | {"rope_parameters": YARN | {"beta_fast": 16.0}},
            "rope_parameters .* got .*'beta_fast': 16.0",
        ),
        ("olmo_hybrid", {}, "model_type .* kimi_linear or qwen3_next, got 'olmo_hybrid'"),
    ],
)
def test_what_our_decoder_lacks_is_refused_by_name(kind, changes, reason, tmp_path):
    save_stock(tmp_path, kind, **(FOLDERS["qwen"][1] if kind == "qwen3_next" else {}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=rf"HF_DIR {tmp_path}: .*{reason}") as caught:
        open_published(tmp_path)
    way_out = f"AutoModelForCausalLM.from_pretrained('{tmp_path}').generate(..)"
    assert str(caught.value).endswith(f"; transformers itself generates with its models: {way_out}")
    assert "this run" not in str(caught.value)


def with_a_head(folder, offset, dtype=torch.float32):
    """Adds a head to a folder with a tied one. offset: by how much its last element differs."""
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    head = weights[name].clone()
    head[-1, -1] += offset
    save_file({**weights, "lm_head.weight": head.to(dtype)}, folder / "model.safetensors")


def head_of_tied(folder, offset, dtype=torch.float32):
    """The head of a tied Qwen3-Next. offset, dtype: see `with_a_head`; None for no head."""
    save_stock(folder, "qwen3_next", **FOLDERS["qwen-dense"][1])
    if offset is not None:
        with_a_head(folder, offset, dtype)
    return load_published(folder, torch.device("cpu")).head.weight


def test_a_head_that_differs_from_a_tied_one_is_refused(tmp_path, capsys, monkeypatch):
    """transformers would load it as a head of its own. An equal copy is a tied head, in any dtype
    and however many rows are compared at a time."""
    wanted = head_of_tied(tmp_path / "tied", None)
    monkeypatch.setattr(safetensors_folder, "_COMPARED_BYTES", 1000)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(head_of_tied(tmp_path / str(dtype), 0.0, dtype), wanted)
    message = (
        f"lm_head.weight in {tmp_path}/own must equal model.embed_tokens.weight or be left out, "
        "because the model's head is tied to its embedding, but they differ; if the head is its "
        "own, set tie_word_embeddings in config.json to false"
    )
    with pytest.raises(UserError) as caught:
        head_of_tied(tmp_path / "own", 1.0)
    assert str(caught.value) == f"HF_DIR {tmp_path}/own: {message}"
    (tmp_path / "text.txt").write_text("Some text.")
    for program, *words in (
        (generate_main, "--prompt", "a"),
        (evaluate_main, "--text", f"{tmp_path}/text.txt", "--out", f"{tmp_path}/a.png"),
    ):
        assert program([f"{tmp_path}/own", "--device", "cpu", *words]) == 2
        assert message in capsys.readouterr().err
    path = tmp_path / "own/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    head = load_published(tmp_path / "own", torch.device("cpu")).head.weight
    assert head[-1, -1] == wanted[-1, -1] + 1


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_experts": 7}, "lacks "),
        ({"num_experts": 2}, ", for which the model in config.json has no place"),
        (
            {"hidden_size": 64},
            "must have the shape (256, 64) of the model in config.json, got (256, 32)",
        ),
    ],
)
def test_wrong_weights_are_refused_by_name(changes, reason, tmp_path, capsys):
    saved(tmp_path, "qwen")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))
    assert generate_main([str(tmp_path), "--prompt", "a"]) == 2
    shown = capsys.readouterr().err
    assert "error: HF_DIR" in shown
    assert reason in shown and "this run" not in shown
    assert "transformers itself" not in shown  # it would miss them, too


@pytest.mark.parametrize("kind", FOLDERS)
def test_runs_of_folders_that_can_be_read_are_told_from_others(kind, tmp_path):
    def why(**changes):
        save_stock(tmp_path, FOLDERS[kind][0], **FOLDERS[kind][1] | changes)
        config = parse(["--model", f"hf:{tmp_path}"])
        return why_not_read(checkpoint.facts(config, VOCAB, 1, torch.float32)["model"])

    assert why() == ""
    assert "head_dim" in why(**{"v_head_dim" if "kimi" in kind else "linear_value_head_dim": 12})


def test_the_command_takes_the_tokenizer_of_the_folder(tmp_path, capsys):
    save_tokenizer(tmp_path)
    save_stock(tmp_path, "qwen3_next", **QWEN, vocab_size=400)
    model, tokenizer, ends = load(tmp_path, torch.device("cpu"))
    assert set(tokenizer.end) <= set(ends)
    (ids,) = tokenizer.ids(["The red fox"])
    (found,), _ = generate(model, [ids], 8, end=ends)
    text = tokenizer.hf.decode(found, skip_special_tokens=True)
    command = [str(tmp_path), "--device", "cpu", "--max-new-tokens", "8"]
    assert generate_main([*command, "--prompt", "The red fox"]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_end_tokens_are_those_of_generation_config(tmp_path):
    saved(tmp_path, "kimi")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert load(tmp_path, torch.device("cpu"))[2] == [4, 9]
