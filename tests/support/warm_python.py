"""A stand-in for `python` that starts in milliseconds, since torch is imported already.

`warm_python()` is the first words of a command, in the place of `sys.executable`:

    subprocess.run([*warm_python(), "-m", "fla_cp.train.main", "--cp", "2"], env=environment())

These words start a small client. It hands its arguments, folder, environment and stdio to a server,
which has imported what this project's programs import, has one thread, and forks. The child runs
the program and ends as a process of Python does; the client ends with the same exit code or signal.
Signals are passed on to the child, and the child is killed if the client is. A launcher that is
started in this way (torchrun, accelerate, the trainer) starts its ranks in the same way.

The real Python runs instead if it is given flags other than -u, or if the environment differs from
the server's in a variable that modules may read when they are imported.

A child has imported more than its program imports. Whether the program imports all that it needs is
for tests that start the real Python.
"""

import atexit
import functools
import gc
import importlib.util
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

if __name__ == "__main__":  # the server
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.support.processes import environment

IMPORTED = (
    *("accelerate.commands.accelerate_cli", "fla_cp.train.evaluate", "fla_cp.train.export"),
    *("fla_cp.train.generate", "fla_cp.train.main", "fla_cp.train.memory", "fla_cp.train.plot"),
    *("fla_cp.train.pretokenize", "fla_cp.train.torchrun", "matplotlib.pyplot", "transformers"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"),
)
READ_LATE = re.compile(
    r"(ACCELERATE|FSDP|GLOO|GROUP|LOCAL|MASTER|NCCL|PARALLELISM_CONFIG|PET|PYTEST|ROLE|TORCHELASTIC"
    r"|TORCH_ELASTIC|TORCH_NCCL)_\w+|FLA_CP_LAUNCHER|FLA_CP_RESTART_COUNT|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|RANK|TORCHINDUCTOR_CACHE_DIR|WORLD_SIZE|XDG_CACHE_HOME"
)
"""Variables that no module reads when it is imported."""
VARIABLES = dict(os.environ) if __name__ == "__main__" else environment()
"""The server's environment, which no test has changed yet."""


def words_of_client(address: str) -> list[str]:
    return [sys.executable, "-IS", str(Path(__file__).with_name("warm_client.py")), address]


@functools.cache
def warm_python() -> list[str]:
    """The words that stand before `script.py`, `-m module` or `-c code`. They start the real Python
    where the kernel has no pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return [sys.executable]
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    address = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env=VARIABLES,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    @atexit.register
    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server of warm_python ended with code {server.wait()}")
    return words_of_client(address)


def run_unread(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code with these arguments, while nobody reads its stdout."""
    read, write = os.pipe()
    os.close(read)
    command = [*warm_python(), "-c", code, *words]
    try:
        return subprocess.run(
            command, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, timeout=900
        )
    finally:
        os.close(write)


def serve(address: str) -> dict[str, Any]:
    """Forks for each client. Returns in the children only, with what their clients asked for.

    A client and the pidfd of its child are registered as (pid, None) and (pid, client).
    """
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    _start_ranks_likewise(address)
    assert len(os.listdir("/proc/self/task")) == 1, "the children would lack the other threads"
    gc.freeze()
    waiting = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waiting.register(listener, selectors.EVENT_READ)
    os.write(1, b"ready\n")
    while True:
        key, _ = waiting.select()[0]
        if key.fileobj is listener:
            client, _ = listener.accept()
            request = _received(client)
            here = _runs_here(request)
            pid = os.fork() if here else 0
            if here and pid == 0:
                for each in [*waiting.get_map().values()]:
                    each.fileobj.close()
                waiting.close()
                client.close()
                return request
            for fd in request["stdio"]:
                os.close(fd)
            _answer(client, pid)
            if here:
                ended = open(os.pidfd_open(pid), "rb")  # noqa: SIM115
                waiting.register(ended, selectors.EVENT_READ, (pid, client))
                waiting.register(client, selectors.EVENT_READ, (pid, None))
            else:
                client.close()
            continue
        pid, client = key.data
        waiting.unregister(key.fileobj)
        if client is None:  # the client was killed
            os.kill(pid, SIGKILL)
            continue
        _answer(client, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        with suppress(KeyError):  # it is gone if the client was killed
            waiting.unregister(client)
        client.close()
        key.fileobj.close()


def _start_ranks_likewise(address: str) -> None:
    """Lets torch's launcher start its ranks by the server."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def popen(args: tuple[str, ...], **more: Any) -> subprocess.Popen:
        if args[0] == sys.executable:
            args = (*words_of_client(address), *args[1:])
        return subprocess.Popen(args, **more)

    subprocess_handler.Popen = popen


def _received(client: socket.socket) -> dict[str, Any]:
    """What a client asks for; {"stdio": ...} alone if the client was killed meanwhile."""
    head, stdio, *_ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as file, suppress(ValueError):
        return {"stdio": stdio, **json.loads(file.read(int.from_bytes(head, "big")))}
    return {"stdio": stdio}


def _answer(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client was killed
        client.sendall(b"%d\n" % number)


def _runs_here(request: dict[str, Any]) -> bool:
    words, variables = request.get("words", []), request.get("variables", {})
    first, *rest = [*words[words[:1] == ["-u"] :], ""]
    script = Path(request.get("folder", ""), first)
    different = {n for n, _ in variables.items() ^ VARIABLES.items() if not READ_LATE.fullmatch(n)}
    return not different and ((first in ("-c", "-m") and len(rest) > 1) or script.is_file())


def enter(request: dict[str, Any]) -> list[str]:
    """Makes this process what the client asks for; returns the program and its arguments."""
    os.setsid()
    for number, fd in enumerate(request["stdio"]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    variables = request["variables"]
    if "FLA_CP_LAUNCHER" in variables:
        variables["FLA_CP_LAUNCHER"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(variables)
    words = request["words"]
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    return words[words[0] == "-u" :]


def run(words: list[str]) -> None:
    """Runs a program as Python does: in a module `__main__`, whose objects live to the end."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first, rest = words[0], words[1:]
    vars(main).update(__builtins__=__builtins__, __package__=None)
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        code = compile(rest[0], "<string>", "exec")
    elif first == "-m":
        sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(rest[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{rest[0]}.__main__")
        if spec is None:
            sys.exit(f"{sys.executable}: No module named {rest[0]}")
        sys.modules.pop(spec.name, None)
        sys.argv = [spec.origin, *rest[1:]]
        vars(main).update(__spec__=spec, __package__=spec.parent, __file__=spec.origin)
        code = spec.loader.get_code(spec.name)
    else:
        sys.argv, sys.path[0] = words, str(Path(first).parent.resolve())
        vars(main).update(__file__=os.path.join(os.getcwd(), first))
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    from fla_cp.train.parent import end_with_parent

    end_with_parent()  # and its children, with it
    asked = serve(sys.argv[1])
    end_with_parent()
    run(enter(asked))
