"""Trains on two GPUs through CUDA graphs while rank 0 is late in each forward, and fails unless
rank 1's waits for it are measured. tests/multi_gpu/test_graphs.py starts it:

    torchrun --nproc-per-node 2 -m tests.support.graph_waits --data text:FILE --out FOLDER ...

The file's packs must be one document each, so that graphs are captured and ranks exchange states.
"""

import sys

import torch

from fla_cp.train.distributed import joined
from fla_cp.train.language_model import blocks_of
from fla_cp.train.parse import parse
from fla_cp.train.step_times import StepTimes
from tests.support.loops import training_loop

FLAGS = [
    *("--model.layers", "2", "--model.hidden-size", "128", "--model.num-heads", "2"),
    *("--device", "cuda", "--seq-len", "1024", "--global-batch-size", "1", "--cp", "2"),
    *("--eval-every", "0", "--tracker", "none", "--cuda-graphs", "on"),
]
CYCLES = 40_000_000
LATE_MS = 15.0
"""Less than the cycles take at the highest clock of a GPU, 2.6 GHz."""
WARM, MEASURED = 6, 3


def main(argv):
    config = parse([*FLAGS, *argv])
    micro_batches = config.data.global_batch_size // (config.data.micro_batch_size or 1)
    read, times = StepTimes.read, []

    def kept(self, *given):
        times.append(read(self, *given))
        return times[-1]

    StepTimes.read = kept
    with joined(config.parallel) as ranks, training_loop(config, ranks) as (loop, feed):
        if ranks.rank == 0:  # after FSDP has gathered the block: the other rank waits for states
            blocks_of(loop.model)[0].register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))
        for _ in range(WARM + MEASURED):
            loop._step(feed, [])
        assert len(loop.graphs.graphs) == 1 and not loop.graphs.hides_waits
        late, waiting = ranks.gather([(t.exchange, t.under_way) for t in times[-MEASURED:]])
        shown = [row["exchange_ms"] for row in loop.log.rows[-MEASURED:]]
    if ranks.rank == 0:
        print("exchange and under way, ms:", late, waiting)
        for (mine, _), (other, whole), row in zip(late, waiting, shown, strict=True):
            assert whole >= other > micro_batches * LATE_MS and 0 < mine < other / 2
            assert row == other
        print("waits in graphs are measured")


if __name__ == "__main__":
    main(sys.argv[1:])
