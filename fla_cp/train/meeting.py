"""The rendezvous of the ranks: all of them reach one store, or the missing ones are named."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from typing import NoReturn

import torch.distributed as dist

from fla_cp.train.config import UserError
from fla_cp.train.exit_codes import HUNG
from fla_cp.train.outlook import Record


def meet(rank: int, world: int, seconds: float) -> dist.Store:
    """The store that all ranks of this run share, once every rank has reached it.

    It holds a record of each rank under the rank's number. If ranks are missing after `seconds`,
    the lowest rank that has arrived names them, and all that have arrived end with exit code HUNG.
    Raises UserError without the environment variables that a launcher sets.
    """
    host, limit = socket.gethostname(), datetime.timedelta(seconds=seconds)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UserError(
            "ranks need a launcher that sets MASTER_ADDR and MASTER_PORT, for example torchrun; "
            f"got MASTER_ADDR={address!r} and MASTER_PORT={port!r}"
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store
    try:
        # Not by env://: its rank 0 waits for the others, but cannot name those that are missing.
        store: dist.Store = dist.TCPStore(
            address,
            int(port),
            world,
            is_master=rank == 0 and not hosted,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        _give_up(
            f"rendezvous: rank {rank} (host {host}) has no answer from {address}:{port} after "
            f"{seconds:g} s (--parallel.rendezvous-seconds): {str(error).splitlines()[0]}"
        )
    # A store that survives a restart still holds the records of the earlier ranks.
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    mine = Record(beat=0, host=host, pid=os.getpid(), parent=os.getppid())
    store.set(str(rank), mine.to_json())
    try:
        store.wait([str(r) for r in range(world)], limit)
    except dist.DistError:
        here = [r for r in range(world) if store.check([str(r)])]
        if len(here) < world and rank == here[0]:
            missing = [r for r in range(world) if r not in here]
            hosts = sorted({Record.from_json(store.get(str(r))).host for r in here})
            _give_up(
                f"rendezvous: {_some(missing)} of {world} ranks are missing after {seconds:g} s "
                f"(--parallel.rendezvous-seconds); here are {_some(here)}, on {', '.join(hosts)}"
            )
        if len(here) < world:
            raise SystemExit(HUNG) from None
    return store


def _give_up(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(HUNG) from None


def _some(ranks: list[int], shown: int = 8) -> str:
    more = f" and {len(ranks) - shown} more" * (len(ranks) > shown)
    return ", ".join(map(str, ranks[:shown])) + more
