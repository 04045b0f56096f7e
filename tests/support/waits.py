"""Takes training steps on CUDA and fails if the host waits for the device more than once in one,
or if a batch that was copied ahead is not the host's.

    python -m tests.support.waits --out FOLDER --device cuda ...        # flags of the trainer
    torchrun --nproc-per-node 2 -m tests.support.waits --out FOLDER --device cuda --cp 2 ...

tests/multi_gpu/test_waits.py starts it, since Triton is set to its interpreter in pytest's process.
"""

import sys

import torch

import fla_cp.train.main
from fla_cp.train.distributed import joined
from fla_cp.train.parse import parse
from fla_cp.train.step import Sums
from tests.support.loops import training_loop

WARM, MEASURED = 5, 4


def main(argv):
    config = parse(argv)
    read, reads = Sums.read, []

    def counted(sums):
        """Waits for an event, which CUDA does not warn of. Any other wait is an error."""
        reads.append(loop.progress.step)
        return read(sums)

    run, wrong = fla_cp.train.main.forward_backward, []

    def compared(model, batches, *args):
        """Compares what was copied ahead with the host's batch, at the time of its use."""
        for batch in batches:
            if batch.ahead is not None:
                for found, wanted in zip(batch.ahead[:2], batch.share[:2], strict=True):
                    wanted = wanted.to(found.device, non_blocking=True)
                    wrong.append((found != wanted).any())
        return run(model, batches, *args)

    Sums.read = counted
    fla_cp.train.main.forward_backward = compared
    with joined(config.parallel) as ranks, training_loop(config, ranks) as (loop, feed):
        for _ in range(WARM):  # compiles, compares contexts, makes the optimiser's state
            loop._step(feed, [])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(MEASURED):
                loop._step(feed, [])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert wrong and not any(wrong), "a batch that was copied ahead has changed"
    assert loop.skips.count == 0
    assert reads == list(range(WARM + MEASURED)), reads
    print(f"one wait in each of {MEASURED} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
