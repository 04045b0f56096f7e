"""Tiny random models of transformers, and what they give for each document alone."""

import importlib
from itertools import pairwise

import torch

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
KIMI = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
}
MODELS = {
    "kimi_linear": ("KimiLinear", "KimiLinearConfig", KIMI),
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig", GATED_DELTA | EXPERTS),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig", GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", GATED_DELTA | EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", "OlmoHybridConfig", GATED_DELTA),
}
"""Kind of model -> its classes' prefix, its configuration, and what makes it tiny."""


def stock_model(kind, seed=0, **changes):
    """A causal language model in training mode, fp32, whose states decay slowly."""
    prefix, config, sizes = MODELS[kind]
    transformers = importlib.import_module("transformers")
    found = getattr(transformers, config)(**(COMMON | sizes | changes))
    found._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(found).float()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("dt_bias"):
                x.uniform_(-3, -1)
            elif name.endswith("A_log"):
                x.uniform_(0, 1)
            elif x.ndim > 1:
                x.normal_(std=0.5 * x.shape[-1] ** -0.5)
            else:
                x.add_(torch.randn_like(x), alpha=0.1)
        for name, x in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                x.uniform_(-0.3, 0.3)
    return model.train()


def routing_margins(model):
    """A list that gets, at each call of a router, by how much the scores of the last expert taken
    and of the first one left differ, for the token with the least difference.

    Rounding decides between scores that differ by no more, and with another expert a loss differs
    by far more than rounding.
    """
    margins = []

    def note(router, inputs, outputs):
        scores = outputs[0].detach().float()
        bias = getattr(router, "e_score_correction_bias", None)
        scores = scores.softmax(-1) if bias is None else scores.sigmoid() + bias
        best = scores.topk(router.top_k + 1, -1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(note)
    return margins


def drawn_tokens(total, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (1, total), generator=generator)


def gradients(model):
    return {
        name: torch.zeros_like(x) if x.grad is None else x.grad.clone()
        for name, x in model.named_parameters()
    }


def documents_alone(model, tokens, labels, offsets):
    """Logits, and the mean loss over all documents with its gradients, by the stock model."""
    count = sum(int((labels[:, a + 1 : b] != -100).sum()) for a, b in pairwise(offsets))
    model.zero_grad()
    logits, loss = [], 0.0
    for a, b in pairwise(offsets):
        if a == b:
            continue
        out = model(
            input_ids=tokens[:, a:b],
            labels=labels[:, a:b],
            num_items_in_batch=count,
            use_cache=False,
        )
        out.loss.backward()
        logits.append(out.logits.detach())
        loss += out.loss.item()
    return torch.cat(logits, 1), loss, gradients(model)
