"""Checkpoints of a small model on one rank, and ways to damage them."""

import contextlib
import json
import os
import resource

import torch
import torch.distributed as dist

from fla_cp.train import checkpoint
from fla_cp.train.checkpoint import Progress
from fla_cp.train.distributed import Ranks, shard_model
from fla_cp.train.integrity import unseal
from fla_cp.train.model import build_model
from fla_cp.train.optim import build_optimizer
from fla_cp.train.parse import parse
from fla_cp.train.saver import Saver

FLAGS = (
    "--device cpu --model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16 "
    "--run.keep-checkpoints 2"
)
VOCAB = 64


def optimizers_of(optimizer):
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


class OneRank:
    """A model of one rank with its optimiser, on a world of one."""

    def __init__(self, ranks, flags="", seed=0):
        self.config = parse(f"{FLAGS} {flags}".split())
        self.ranks = ranks
        self.model = build_model(self.config.model, VOCAB, seed)
        shard_model(self.model, ranks, torch.float32)
        self.optimizer = build_optimizer(self.model, self.config.optim)

    def update(self):
        for p in self.model.parameters():
            p.grad = p.detach().cos()
        self.optimizer.step()

    def facts(self, vocab_size=VOCAB, packs=10):
        return checkpoint.facts(self.config, vocab_size, packs, torch.float32)

    def saver(self, run, say=lambda line: None):
        return Saver(run, self.facts(), self.config.run.keep_checkpoints, self.ranks, say)

    def save(self, run, step, skipped=0):
        with contextlib.closing(self.saver(run)) as saver:
            return saver.write(self.model, self.optimizer, Progress(step, skipped))

    def load(self, path):
        return checkpoint.load(path, self.model, self.optimizer, self.ranks)

    def tensors(self):
        """Parameters and moments by name."""
        found = {}
        for name, p in self.model.named_parameters():
            found[name] = p.full_tensor().clone()
            states = [o.state for o in optimizers_of(self.optimizer)]
            (state,) = [state[p] for state in states if p in state]
            for key, value in state.items():
                found[f"{name}.{key}"] = getattr(value, "full_tensor", lambda v=value: v)().clone()
        return found


def ranks_without_mesh(group, rank):
    """Ranks without a mesh, which is enough for the saver and the search for a checkpoint."""
    size = dist.get_world_size(group)
    empty = dict.fromkeys(("mesh", "fsdp_mesh", "cp_group"))
    sizes = {"cp": 1, "dp_rank": rank, "dp": size, "dp_replicate": size}
    return Ranks(
        rank=rank, world_size=size, device=torch.device("cpu"), host_group=group, **empty, **sizes
    )


def names(run):
    return sorted(f.name for f in (run / "checkpoints").iterdir())


def as_format_1(path):
    """Rewrites trainer.json as the previous version of the package wrote it."""
    record = unseal((path / "trainer.json").read_bytes())
    kept = {k: record[k] for k in ("step", "skipped", "data")}
    names = ("layers", "hidden_size", "num_heads", "head_dim", "tie_embeddings", "vocab_size")
    model = {name: record["model"][name] for name in names}
    (path / "trainer.json").write_text(json.dumps({"format": 1, **kept, "model": model}))


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.makedirs, (str(self.marker), 0o777, True))


@contextlib.contextmanager
def disk_of(size):
    """Limits the size of files that this process writes, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
