"""Runs with random weights, and what becomes of them in folders of published models."""

from contextlib import closing

import torch

from fla_cp import build_cp_context
from fla_cp.train import checkpoint
from fla_cp.train.build import build_sharded
from fla_cp.train.checkpoint import Progress
from fla_cp.train.distributed import joined
from fla_cp.train.model import build_model
from fla_cp.train.optim import build_optimizer
from fla_cp.train.parse import parse
from fla_cp.train.saver import Saver
from fla_cp.train.weights import local_tensor, owned_rows

VOCAB = 97
TINY = (
    "--device cpu --impl torch --model.layers 3 --model.hidden-size 32 --model.num-heads 2 "
    "--model.head-dim 16 --data synthetic --seq-len 64 "
)
KIMI, QWEN = "--model.pattern kda,mla ", "--model.pattern gdn,attention "
KIMI_EXPERTS = (
    KIMI + "--model.experts 6 --model.routing sigmoid --model.shared-experts 2 "
    "--model.dense-layers 1 --model.routing-scale 2.446 --model.tie-embeddings False "
)
QWEN_EXPERTS = (
    QWEN + "--model.experts 6 --model.experts-per-token 3 --model.shared-experts 1 "
    "--model.tie-embeddings False "
)
MODELS = {
    "kimi": KIMI,
    "kimi-experts": KIMI_EXPERTS,
    "qwen": QWEN,
    "qwen-experts": QWEN_EXPERTS,
    "qwen-dense-first": QWEN_EXPERTS + "--model.dense-layers 1 --model.experts-per-token 1",
    "kda": "--mixer kda --model.gate-bias False",
    "mla": "--mixer mla --model.norm-eps 1e-3",
    "gdn": "--mixer gdn --model.norm-eps 1e-3",
    "yarn": "--mixer attention --model.rope-scaling yarn:4:16 --model.rope-theta 500",
    "odd-heads": "--mixer attention --model.head-dim 18 --model.num-heads 3",
}
"""What fla-cp-export can write, as flags."""


def model_config(flags):
    return parse((TINY + flags).split())


def randomised(model, seed=0):
    """The same model with logits of the order of one, norms and biases that matter, and states
    that decay slowly."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(x, low, high):
        return torch.rand(x.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name == "head.weight" and model.shape.tie_embeddings:
                continue
            if name.endswith("dt_bias"):
                x.copy_(drawn(x, -3, -1))
            elif name.endswith("A_log"):
                x.copy_(drawn(x, 0, 1))
            elif name.endswith("correction_bias"):
                x.copy_(drawn(x, -0.3, 0.3))
            elif x.ndim == 1:
                x.copy_(drawn(x, 0.4, 1.6))
            else:
                x.copy_(drawn(x, -1, 1) * 0.9 * x.shape[-1] ** -0.5)
    return model


def random_model(flags, seed=0):
    return randomised(build_model(model_config(flags).model, VOCAB, 0), seed)


def save(run, model, config, ranks, seq_len=64):
    """Writes a checkpoint of a model over these ranks, as a run of `config` does. Collective."""
    optimizer = build_optimizer(model, config.optim)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # so that it has moments
    facts = checkpoint.facts(config, VOCAB, 10, torch.float32)
    with closing(Saver(run, facts, 2, ranks, lambda line: None)) as saver:
        saver.write(model, optimizer, Progress(3))


def random_run(run, flags, seed=0):
    """A run of one rank with random weights; returns its model."""
    config = model_config(flags + " --optim.weight-decay 0")
    model = random_model(flags, seed)
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with joined(config.parallel) as ranks:
        sharded = build_sharded(config.model, VOCAB, None, ranks, torch.float32)
        fill(sharded, kept)
        save(run, sharded, config, ranks)
    return model


def fill(sharded, whole):
    """Sets this rank's shard of each weight to its rows of `whole`."""
    with torch.no_grad():
        for name, x in [*sharded.named_parameters(), *sharded.named_buffers()]:
            if name in whole:
                rows = owned_rows(x)
                local_tensor(x).copy_(whole[name][rows.start : rows.stop])


def logits_of(model, tokens):
    context = build_cp_context(torch.tensor([0, tokens.shape[1]]), None, conv1d_kernel_size=4)
    with torch.no_grad():
        return model(tokens, context)


def files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
