"""A stock model of transformers on N ranks: on GPUs in bf16 with kernels, on the CPU in bf16 and in
fp32 with the torch stages."""

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context
from tests.support.ranks_against_one import RANGES, device_of

pytest.importorskip("transformers", minversion="5.23")

from fla_cp.integrations.transformers import parallelize
from tests.support.stock_models import documents_alone, drawn_tokens, gradients, stock_model

OFFSETS = (0, 100, 240, 241, 600)
UNIT = {torch.float32: 2**-18, torch.bfloat16: 3 * 2**-7}
EVERY = {"num_experts_per_tok": 4}
"""All experts of stock_models.py: with fewer, rounding to bf16 would decide which ones some tokens
take, and errors would be those of other experts."""
CHANGES = {
    "kimi_linear": EVERY,
    "qwen3_next": EVERY,
    "qwen3_5": {},
    "qwen3_5_moe": EVERY,
    "olmo_hybrid": {},
}
"""Kind of model -> what differs from its configuration in stock_models.py."""
DTYPES = [torch.bfloat16] if torch.cuda.device_count() else [torch.float32, torch.bfloat16]


def step(model, group, ranges, tokens):
    """Logits of all tokens, and the gradients of all ranks together."""
    world_size = 1 if group is None else group.size()
    context = build_cp_context(
        torch.tensor(OFFSETS, device=tokens.device),
        group,
        conv1d_kernel_size=4,
        token_ranges=RANGES[ranges](OFFSETS[-1], world_size),
    )
    mine = context.shard(tokens)
    model.zero_grad()
    out = model(input_ids=mine, labels=mine, cp_context=context)
    out.loss.backward()
    grads = gradients(model)
    if group is not None:
        for x in grads.values():
            dist.all_reduce(x, group=group)
    return {"logits": context.unshard(out.logits.detach()), **grads}


def compare(group, rank, kind, ranges, dtype):
    """Ranks err at most twice as much as one rank, plus roundings (`assert_close` says how many).
    Errors are L2 norms, relative to the stock model in fp32."""
    device = device_of(group)
    model = stock_model(kind, **CHANGES[kind]).to(device)
    tokens = drawn_tokens(OFFSETS[-1]).to(device)
    logits, _, grads = documents_alone(model, tokens, tokens, OFFSETS)
    parallelize(model).to(dtype).activation_checkpointing_enable({"use_reentrant": True})
    one, many = step(model, None, "contiguous", tokens), step(model, group, ranges, tokens)
    for name, exact in {"logits": logits, **grads}.items():
        usual, error = ((x[name].float() - exact).norm() / exact.norm() for x in (one, many))
        assert error <= 2 * usual + UNIT[dtype], f"{name}: {error:.1e}, {usual:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranges", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", CHANGES)
def test_ranks_equal_one(run, kind, ranges, dtype):
    run(compare, kind, ranges, dtype)
