"""The rendezvous of ranks on one host: a store that only this host can reach.

The backends of torch's launcher host their stores on every interface of the machine, whatever
address they are given. All ranks that our own launcher starts are on this host, so this backend
binds to the loopback interface. It is chosen by `LaunchConfig(rdzv_backend=BACKEND)`.
"""

from __future__ import annotations

import os
import socket
import sys

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "loopback"


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single agent, which is complete at once."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each start of the ranks, so that a restart finds no old keys."""
        store = loopback_store()
        place = RendezvousStoreInfo(ADDRESS, store.port)
        return RendezvousInfo(store, rank=0, world_size=1, bootstrap_store_info=place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def loopback_store() -> dist.TCPStore:
    """A store that this process hosts on a free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        port = listener.getsockname()[1]
        return dist.TCPStore(
            ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register() -> None:
    """Makes BACKEND known to torch's launcher; it may be called more than once."""
    rendezvous_handler_registry.register(BACKEND, _create)


def stay_local() -> None:
    """Makes gloo and NCCL of this process listen on the loopback only, unless the user says where.

    To be called if all ranks are on this host. By default gloo and NCCL take the interface of the
    host's name, which other hosts can reach.
    """
    if sys.platform == "linux":  # there the loopback is called lo
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
