"""What a checkpoint costs: the pause of a step, writing, verifying and loading, as JSON.

    python -m benchmarks.checkpoint --size 340M --folder /path/on/the/file/system
    torchrun --nproc-per-node 8 -m benchmarks.checkpoint --ranks 8 --size 1.3B --folder ...

Seconds, the longest of the ranks. `blocking` is a checkpoint that the step waits for, as every one
was before; `paused` is what a background one costs the step, first with new buffers, then with the
ones that are kept. `verify` and `load` read what the page cache of this host still holds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fla_cp.train import checkpoint
from fla_cp.train.build import build_sharded
from fla_cp.train.checkpoint import Progress
from fla_cp.train.distributed import Ranks, joined, local_ranks, threads_per_rank
from fla_cp.train.optim import build_optimizer
from fla_cp.train.parse import parse
from fla_cp.train.saver import Saver

VOCABULARY = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", default="340M", choices=["tiny", "340M", "1.3B"])
    parser.add_argument("--layers", help="instead of the size's own")
    parser.add_argument("--ranks", default="1", help="how many torchrun starts")
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary one")
    flags = parser.parse_args()
    layers = [] if flags.layers is None else ["--model.layers", flags.layers]
    config = parse(["--model", flags.size, *layers, "--dp-shard", flags.ranks]
                   + ["--global-batch-size", flags.ranks])  # fmt: skip
    with joined(config.parallel) as ranks:
        run = Path(ranks.broadcast(tempfile.mkdtemp(dir=flags.folder) if ranks.rank == 0 else ""))
        try:
            report = measure(config, ranks, run)
        finally:
            ranks.barrier()
            if ranks.rank == 0:
                shutil.rmtree(run, ignore_errors=True)
        if ranks.rank == 0:
            print(json.dumps(report, indent=1))


def measure(config: Any, ranks: Ranks, run: Path) -> dict[str, Any]:
    """The report of one model, with `ranks` ranks writing below `run`."""

    def timed(call: Callable[[], Any]) -> float:
        ranks.barrier()
        begin = time.perf_counter()
        call()
        return round(ranks.host_max([time.perf_counter() - begin])[0], 4)

    model = build_sharded(config.model, VOCABULARY, 0, ranks, torch.float32)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    facts = checkpoint.facts(config, VOCABULARY, 1, torch.float32)
    state = (model, optimizer)
    seconds: dict[str, float] = {}
    with closing(Saver(run, facts, 1, ranks, lambda line: None)) as saver:
        seconds["blocking"] = timed(lambda: saver.write(*state, Progress(1)))
        for number, name in ((2, "paused first"), (3, "paused")):
            seconds[name] = timed(lambda step=number: saver.start(*state, Progress(step)))
            seconds[f"written after {name}"] = timed(saver.wait)
    (path,) = checkpoint.checkpoints(run)
    taken = [path], "auto", False, ranks, print
    seconds["verify"] = timed(lambda: checkpoint.newest_whole(*taken))
    seconds["load"] = timed(lambda: checkpoint.load(path, model, optimizer, ranks))
    size = sum(file.stat().st_size for file in path.iterdir())
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU",
        "host": platform.processor() or platform.machine(),
        "ranks": ranks.world_size,
        "threads a rank": threads_per_rank(local_ranks()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size,
        "seconds": seconds,
        "verify GB/s": round(size / seconds["verify"] / 1e9, 2),
    }


if __name__ == "__main__":
    main()
