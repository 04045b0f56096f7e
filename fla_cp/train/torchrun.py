"""torchrun that ends with the exit code of its ranks: `python -m fla_cp.train.torchrun ARGUMENTS`.

The arguments are torchrun's. torchrun itself exits with 1 whatever its ranks' exit codes are, and
restarts them after each. This program exits with the code of the first rank that failed if
fla_cp/train/exit_codes.py has it, else with 1, and it does not restart ranks after MISTAKE or
DIVERGED, which would end in the same way. Slurm and Kubernetes can then tell these ends apart.
After SIGTERM the ranks have GRACE seconds for their last checkpoint; torchrun gives them 30.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from fla_cp.train.exit_codes import DIVERGED, FAILED, HUNG, MISTAKE

GRACE = 270
"""Seconds from a signal to SIGKILL, unless `--shutdown-timeout` or its variable says otherwise.

It is less than the 300 s of launch/slurm.sh and launch/kubernetes.yaml. PyTorch 2.13 has this
limit; a version without it goes on giving 30 s."""

EXPLAINED = (MISTAKE, DIVERGED, HUNG)
"""Codes of ranks that have printed the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks as torchrun would and returns the exit code of this host's ranks."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    try:
        with _final_codes():
            run.main(None if argv is None else list(argv))
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        if failure.exitcode not in EXPLAINED:
            print(error, file=sys.stderr)
            return FAILED
        print(f"rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode
    except SignalException as error:
        print(f"error: ended by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return FAILED
    return 0


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first and how; of ranks that failed together, the one that explains it.

    HUNG says that a rank lost another one. Then the reason is a rank of this host that was killed,
    though not by SIGTERM, which the launcher sends to the ranks that are left.
    """
    rank, failure = error.get_first_failure()
    if failure.exitcode == HUNG:
        for other, ended in error.failures.items():
            final = ended.exitcode in (MISTAKE, DIVERGED)
            if final or (ended.exitcode < 0 and ended.exitcode != -signal.SIGTERM):
                return other, ended
    return rank, failure


class _Agent(local_elastic_agent.LocalElasticAgent):
    """torchrun's agent, which has no restarts left once a rank's end is final."""

    def _monitor_workers(self, *arguments: Any) -> Any:
        result = super()._monitor_workers(*arguments)
        ends = [failure.exitcode for failure in result.failures.values()]
        if MISTAKE in ends or DIVERGED in ends:
            self._remaining_restarts = 0
        return result


@contextmanager
def _final_codes() -> Iterator[None]:
    """In the block, torchrun starts its ranks by `_Agent`; it has no argument for that."""
    before = vars(api)["LocalElasticAgent"]
    vars(api)["LocalElasticAgent"] = _Agent
    try:
        yield
    finally:
        vars(api)["LocalElasticAgent"] = before


if __name__ == "__main__":
    sys.exit(main())
