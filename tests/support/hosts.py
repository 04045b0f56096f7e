"""Two hosts on one machine: network namespaces joined by a virtual cable, one torchrun in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # exist only inside the two namespaces
PORT = 29471


class NoNamespaces(RuntimeError):
    """This machine or user cannot make network namespaces; the message says why."""


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two namespaces that can reach only each other; they are deleted afterwards.

    Each has the address `ADDRESSES[i]` on an interface called `cable`, and shares no interface with
    the machine. Raises NoNamespaces if they cannot be made.
    """
    if sys.platform != "linux":
        raise NoNamespaces(f"network namespaces need Linux, this is {sys.platform}")
    if shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need the ip command (iproute2)")
    names = [f"host{i}-{os.getpid()}" for i in range(2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            cable = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
            _ip("link", "add", "cable", "netns", names[0], *cable)
            for name, address in zip(names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip() or error
            raise NoNamespaces(f"{' '.join(error.cmd[:3])} is refused: {reason}") from error
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name, check=False)


def run_on_two_hosts(
    command: Sequence[str], ranks_per_host: int, folder: Path, timeout: float = 120
) -> str:
    """Runs `torchrun --nnodes 2 command` on two hosts; returns the output of both.

    folder: the working directory of both. Raises RuntimeError with their output if either fails or
    they take longer than `timeout` seconds, and NoNamespaces like `two_hosts`.
    """
    with two_hosts() as names, contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in names]
        agents = []
        for i, (name, log) in enumerate(zip(names, logs, strict=True)):
            torchrun = [
                *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--nproc-per-node", str(ranks_per_host)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"),
                *("--rdzv-id", "two-hosts", "--rdzv-conf", f"is_host={i == 0}"),
                *("--local-addr", ADDRESSES[i]),
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            agent = subprocess.Popen(
                [*torchrun, *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            agents.append(agent)
            stack.callback(_end, agent, name)
        failure = ""
        try:
            for agent in agents:
                agent.wait(timeout)
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout} s"
        codes = [agent.poll() for agent in agents]
        if not failure and any(codes):
            failure = f"exit codes {codes}"
        output = ""
        for name, log in zip(names, logs, strict=True):
            log.seek(0)
            output += f"--- {name}\n{log.read()}"
        if failure:
            raise RuntimeError(f"two hosts: {failure}\n{output}")
        return output


def _end(agent: "subprocess.Popen[str]", name: str) -> None:
    """Ends an agent and everything that still runs in its namespace, for example lost ranks."""
    if agent.poll() is None:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    for pid in _ip("netns", "pids", name, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
