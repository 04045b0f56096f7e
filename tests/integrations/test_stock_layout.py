"""Rows of a stock model's tensors are found in its published layout, and folders are judged."""

import json

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from fla_cp.integrations import stock_layout
from fla_cp.integrations.safetensors_folder import TensorFolder
from fla_cp.integrations.stock_export import export_stock
from fla_cp.integrations.stock_folder import folder_facts, has_weights, read_config_json
from fla_cp.integrations.stock_layout import layout_of, published_shapes
from tests.support.stock_folders import save_stock
from tests.support.stock_models import COMMON, GATED_DELTA, MODELS


def on_meta(folder):
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shapes_of(folder):
    return {name: tensor.shape for name, tensor in folder.tensors.items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("read_bytes", [64, 2**26])
def test_every_row_is_read_and_written_back(tmp_path, monkeypatch, kind, read_bytes):
    monkeypatch.setattr(stock_layout, "READ_BYTES", read_bytes)
    stored = TensorFolder(save_stock(tmp_path, kind))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    model = on_meta(tmp_path)
    layout = layout_of(model, shapes_of(stored))
    assert published_shapes(model) == shapes_of(stored) and not layout.ignored
    assert [target.name for target in layout.targets] == list(whole)
    written = {}
    for target in layout.targets:
        rows = target.shape[0]
        for lo, hi in ((0, rows), (rows // 3, rows // 2 + 1), (rows, rows)):
            out = torch.full((hi - lo, *target.shape[1:]), torch.nan)
            target.fill(out, lo, stored.read)
            assert torch.equal(out, whole[target.name][lo:hi]), target.name
        written.update(target.published(whole[target.name]))
    assert list(written) and set(written) == set(stored.tensors)
    for name, x in written.items():
        assert torch.equal(x, stored.read(name)), name


def test_the_files_of_a_tokenizer_go_with_the_weights(tmp_path):
    """Those of the published Kimi Linear, and templates beside the default one."""
    save_stock(tmp_path / "in", "kimi_linear")
    files = "tiktoken.model", "tokenizer_config.json", "additional_chat_templates/tools.jinja"
    for name in (*files, "tokenization_kimi.py"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", local_files_only=True)
    export_stock(tmp_path / "in", tmp_path / "out", model.state_dict().__getitem__)
    for name in files:
        assert (tmp_path / "out" / name).read_text() == name
    assert not (tmp_path / "out/tokenization_kimi.py").exists()


@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_next", "olmo_hybrid"])
def test_only_the_rows_of_a_rank_are_read(tmp_path, kind):
    """Each of 4 ranks reads a quarter, also of experts that are published one by one."""
    stored = TensorFolder(save_stock(tmp_path, kind))
    read = []

    def counted(name, begin, end):
        rows = stored.read(name, begin, end)
        read.append(rows.nbytes)
        return rows

    for target in layout_of(on_meta(tmp_path), shapes_of(stored)).targets:
        share = -(-target.shape[0] // 4)
        for rank in range(4):
            read.clear()
            part = range(target.shape[0])[rank * share :][:share]
            out = torch.empty(len(part), *target.shape[1:])
            target.fill(out, part.start, counted)
            assert sum(read) == out.nbytes, (target.name, rank)


def test_files_that_do_not_fit_are_named(tmp_path):
    stored = TensorFolder(save_stock(tmp_path, "qwen3_next"))
    model, shapes = on_meta(tmp_path), shapes_of(stored)
    assert layout_of(model, {**shapes, "mtp.norm.weight": (32,)}).ignored == ("mtp.norm.weight",)
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(ValueError, match=r"model.norm.weight of Qwen3NextForCausalLM is missing"):
        layout_of(model, {n: s for n, s in shapes.items() if n != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"other.weight must be a tensor of Qwen3NextForCausalLM"):
        layout_of(model, {**shapes, "other.weight": (3,)})
    with pytest.raises(ValueError, match=r"model.norm.weight must have shape \(32,\), got \(31,\)"):
        layout_of(model, {**shapes, "model.norm.weight": (31,)})
    with pytest.raises(ValueError, match=r"last dimension of .*gate_up_proj, 32, must be that of"):
        layout_of(model, {**shapes, expert: (16, 31)})
    short = layout_of(model, {n: s for n, s in shapes.items() if n != expert})
    with pytest.raises((ValueError, RuntimeError)):  # one expert fewer of the two kinds
        [target.table() for target in short.targets]


CHANGES = {
    "model_type of .*, got 'llama'": {"model_type": "llama"},
    r"not quantised, but it has quantization_config \(fp8\)": {
        "quantization_config": {"quant_method": "fp8"}
    },
    "a text model, but it has vision_config": {"vision_config": {"depth": 2}},
    "attention_dropout 0, got 0.1": {"attention_dropout": 0.1},
    "final_logit_softcapping left out, got 30.0": {"final_logit_softcapping": 30.0},
    "sliding_window left out, got 64": {"sliding_window": 64},
    "rope_parameters of a type .* yarn or llama3: .* got .*dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}
    },
    "rope_scaling of a type .* got .*longrope": {"rope_scaling": {"type": "longrope"}},
    "rope_parameters of a type .* got .*full_attention.*dynamic": {
        "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}
    },
}


@pytest.mark.parametrize("message", CHANGES)
def test_folders_that_cannot_be_trained_are_refused_by_name(tmp_path, message):
    folder = save_stock(tmp_path, "qwen3_next")
    config = json.loads((tmp_path / "config.json").read_text())
    assert read_config_json(folder) == config and has_weights(folder)
    assert folder_facts(folder)["num_experts"] == 4 and "dtype" not in folder_facts(folder)
    (tmp_path / "config.json").write_text(json.dumps(config | CHANGES[message]))
    with pytest.raises(ValueError, match=message):
        read_config_json(folder)


def test_the_text_model_of_a_folder_with_a_vision_tower(tmp_path):
    """By the lines of docs/transformers.md, which the refusal names."""
    text = {**COMMON, **GATED_DELTA, "vocab_size": 256}
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    sizes |= {"out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=sizes)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "whole")
    message = r"it has vision_config: .*from_pretrained\(folder\).save_pretrained\(text_folder\)"
    with pytest.raises(ValueError, match=message):
        read_config_json(tmp_path / "whole")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    alone.save_pretrained(tmp_path / "text")
    assert read_config_json(tmp_path / "text")["model_type"] == "qwen3_5_text"
    stock, wanted = on_meta(tmp_path / "text"), model.model.language_model.state_dict()
    layout = layout_of(stock, shapes_of(stored := TensorFolder(tmp_path / "text")))
    for target in layout.targets:
        out = torch.empty(target.shape)
        target.fill(out, 0, stored.read)
        name = target.name.removeprefix("model.")
        assert out.equal(wanted.get(name, model.lm_head.weight)), target.name


def test_folders_without_a_configuration_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a folder, got"):
        read_config_json(tmp_path / "none")
    with pytest.raises(ValueError, match=r"config.json cannot be read: No such file"):
        read_config_json(tmp_path)
    for text, message in (("{", "must be JSON"), ("[]", "must hold an object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config_json(tmp_path)
    assert not has_weights(tmp_path)
