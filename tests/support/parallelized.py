"""Parallelized models of transformers on tiny packed batches, against each document alone."""

import copy
import threading
from functools import cache

import pytest
import torch

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.integrations.transformers import parallelize
from tests.support.stock_models import documents_alone, drawn_tokens, gradients, stock_model

OFFSETS = (0, 37, 40, 40, 101, 150)

LOGITS = 2e-5
"""Largest difference of logits that are of the order of two, in fp32: 80 roundings. Processors add
up in other orders; on one of them two right results differ by 1.01e-5."""

GRADIENTS = 5e-5
"""Largest relative difference of a gradient in fp32, the least budget of the trainer's parity."""

LAYOUTS = {
    "zigzag": lambda R: zigzag_token_ranges(150, R),
    "uneven": lambda R: [*[[(r, r + 1)] for r in range(R - 1)], [(R - 1, 150)]],
    "contiguous": lambda R: None,
}

REMAT = {
    "none": None,
    "checkpoints": {"use_reentrant": False},
    "reentrant checkpoints": {"use_reentrant": True},
}


def drawn():
    tokens, labels = drawn_tokens(150), drawn_tokens(150, seed=2)
    labels[:, 41:60] = -100
    return tokens, labels


@cache
def made(kind):
    model = stock_model(kind)
    return model, documents_alone(model, *drawn(), OFFSETS)


ONE_AT_A_TIME = threading.Lock()  # ranks that are threads share the random number generator


def alone(kind):
    """A stock model, and what it gives for each document alone."""
    with ONE_AT_A_TIME:
        return made(kind)


def parallelized(kind):
    model = parallelize(copy.deepcopy(alone(kind)[0]))
    model.zero_grad()
    return model


def one_rank(offsets=OFFSETS, **options):
    return build_cp_context(torch.tensor(offsets), None, conv1d_kernel_size=4, **options)


def assert_same(found, wanted):
    """found, wanted: logits, loss and gradients."""
    (logits, loss, grads), (right, mean, exact) = found, wanted
    torch.testing.assert_close(logits, right, rtol=0, atol=LOGITS)
    assert loss == pytest.approx(mean, rel=1e-5)
    for name, x in exact.items():
        difference = (grads[name] - x).norm() / x.norm()
        assert difference <= GRADIENTS, f"gradient of {name}: {difference:.1e}"


def rank_share(group, rank, kind, layout, remat):
    model, (tokens, labels) = parallelized(kind), drawn()
    if REMAT[remat] is not None:
        model.activation_checkpointing_enable(REMAT[remat])
    context = build_cp_context(
        torch.tensor(OFFSETS),
        group,
        conv1d_kernel_size=4,
        token_ranges=LAYOUTS[layout](group.size()),
    )
    mine = {"input_ids": context.shard(tokens), "labels": context.shard(labels)}
    out = model(**mine, cp_context=context)
    out.loss.backward()
    return context.unshard(out.logits.detach()), out.loss.item(), gradients(model)


def added(shares):
    """The whole of what ranks have shares of; their logits are the same."""
    logits, losses, grads = zip(*shares, strict=True)
    return logits[0], sum(losses), {n: sum(g[n] for g in grads) for n in grads[0]}
