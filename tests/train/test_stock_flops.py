"""The count of operations of models of transformers, against torch's own counter."""

import pytest

pytest.importorskip("transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode

from fla_cp import build_cp_context
from fla_cp.integrations.transformers import parallelize
from fla_cp.train.config import ModelConfig
from fla_cp.train.flops import step_flops
from fla_cp.train.stock import StockModel
from tests.support.stock_models import MODELS, stock_model


def of_inverse(A, B, *args, out_val=None, **kwargs):
    """Operations of inverting unit triangular matrices [.., C, C], which torch does not count."""
    *batch, C, _ = A
    return int(torch.Size(batch).numel()) * C * (C - 1) * (C - 2) // 3


@pytest.mark.parametrize("kind", MODELS)
def test_formula_counts_what_the_torch_backend_runs(kind):
    documents = [200, 1, 99]
    changes = {"num_experts_per_tok": 4} if kind != "olmo_hybrid" else {}  # of 4: eager runs all
    stock = stock_model(kind, **changes)
    stock.config._experts_implementation = "eager"
    model = StockModel(parallelize(stock), ModelConfig(impl="torch"))
    context = build_cp_context(torch.tensor([0, 200, 201, 300]), None, conv1d_kernel_size=4)
    ids = torch.randint(97, (1, 300))
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: of_inverse}
    )
    with counter:
        model(ids, context, ids).backward()
    parts = step_flops(model, 300, documents)
    formula = sum(part.executed for part in parts.values())
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.005)
    for name in ("projections", "ffn", "head", "scores", "states", "attention"):
        assert parts[name].executed > 0.01 * formula, name
