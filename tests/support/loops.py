"""A training loop without a launcher and a command line, of which a test takes single steps."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

from fla_cp.train import checkpoint
from fla_cp.train.build import build_sharded
from fla_cp.train.distributed import compute_dtype, joined
from fla_cp.train.main import Loop
from fla_cp.train.metrics import RunLog
from fla_cp.train.optim import build_optimizer
from fla_cp.train.parse import parse
from fla_cp.train.saver import Saver
from fla_cp.train.sources import build_dataset
from fla_cp.train.step import Feed, HeldOut
from fla_cp.train.weights import local_tensor


@contextlib.contextmanager
def training_loop(config, ranks):
    """A `Loop` on fresh weights and its `Feed`. The run folder, config.run.out, is made."""
    run = Path(config.run.out)
    run.mkdir(parents=True, exist_ok=True)
    data = build_dataset(config.data.source, config.data.seq_len, "train", config.run.seed)
    dtype = compute_dtype(config.parallel.dtype, ranks.device)
    free = config.data.max_documents is None
    given = config.model, data.vocab_size, config.run.seed, ranks, dtype
    model = build_sharded(*given, compiled=free)
    optimizer = build_optimizer(model, config.optim)
    facts = checkpoint.facts(config, data.vocab_size, data.extent, dtype)
    log, progress = RunLog(run, config.run, ranks, None), checkpoint.Progress()
    with (
        contextlib.closing(log),
        contextlib.closing(Saver(run, facts, 1, ranks, log.print)) as saver,
        Feed(config, data, ranks, 0) as feed,
    ):
        yield Loop(config, ranks, data, None, model, optimizer, progress, log, saver), feed


def steps_taken(model, folder, *flags, steps=8):
    """Losses, norms and held-out losses (0.0 where there is none) of the steps of one rank, the
    weights after them, and what the loop's graphs have then: graphs, seen and fixed."""
    config = parse([*model, *flags, "--out", str(folder)])
    with joined(config.parallel) as ranks, training_loop(config, ranks) as (loop, feed):
        valid = build_dataset(config.data.source, config.data.seq_len, "valid", config.run.seed)
        loop.held_out = HeldOut(config, valid, ranks)
        for _ in range(steps):
            loop._step(feed, [])
        rows = [(r["loss"], r["grad_norm"], r["eval_loss"] or 0.0) for r in loop.log.rows]
        weights, found = [local_tensor(p).clone() for p in loop.model.parameters()], loop.graphs
        if found is not None:  # the graphs themselves end with the ranks
            found = SimpleNamespace(graphs=dict(found.graphs), seen=found.seen, fixed=found.fixed)
        return rows, weights, found
