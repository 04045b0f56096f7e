"""Other processes: their environment, their children, whether they are alive, where they listen."""

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds; a busy machine takes 60 to import torch in two ranks


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which Python finds this clone first, and then what it finds
    here, and computes in one thread; and `more`. A trainer in this process may have changed how
    many threads its environment asks for."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def wait_for(what: str, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Waits until `condition()` is true and returns its value.

    Raises TimeoutError that names `what`.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout} s")
        time.sleep(0.05)
    return value


def _state_and_parent(pid: int) -> tuple[str, int]:
    """The state's letter and the parent's pid; ("", 0) if the process has ended."""
    try:
        # after the name, which may hold spaces and parentheses
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state, int(parent)


def alive(pid: int) -> bool:
    """Whether a process runs or is stopped. A zombie is not alive."""
    return _state_and_parent(pid)[0] not in ("", "Z", "X")


def children(pid: int) -> list[int]:
    """The child processes of a process, oldest first unless pids have wrapped around."""
    all_pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return sorted(p for p in all_pids if _state_and_parent(p)[1] == pid and alive(p))


def listening(pid: int) -> list[tuple[str, int]]:
    """(address, port) of each TCP socket that a process listens on."""
    inodes = set()
    for file in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{file}"))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: TCP_LISTEN
                address, port = fields[1].split(":")
                # words of 32 bits, each in this machine's order
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(words)}I", *words)
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
