"""Ranks for tests: gloo processes that live for the session, or threads in this process.

Both run `fn(group, rank, *args)` once on each rank and return the list of results, rank 0 first:

    results = gloo_pool.run(fn, *args, world_size=4)   # fixture; fn is a module-level function
    results = run_threads(fn, 4, *args)                # fn may be a closure; nothing is pickled

Processes behave like real ranks: they have every collective, real timing and one autograd engine
each. Threads start in milliseconds and can be stepped through in a debugger, but share the random
number generator and the default dtype, so draw data before. The exception of a failing rank is
raised here, chained to its traceback with the rank's number; `pytest.raises` sees the original
type.
"""

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

# Generous, since a machine may be busy; only calls that fail take so long.
START_SECONDS = 600  # four interpreters import torch at once
RUN_SECONDS = 600  # a call of `run` or `run_threads`
GRACE_SECONDS = 20  # time for the other ranks to fail by themselves after one has failed


class RankTraceback(Exception):
    """Carries a rank's traceback, as text, to the process that called `run`."""

    def __str__(self) -> str:
        return "\n" + "".join(self.args)


class RankDied(RuntimeError):
    """The process of a rank ended without an answer."""


class RankPool:
    """Up to `size` ranks in spawned processes, which the first call of `run` starts.

    device: "cpu" for ranks over gloo, "cuda" for ranks over NCCL with a GPU each. The processes are
    reused, so a call must leave nothing behind in them. They are replaced after a time-out, a
    crash, or a call in which some ranks failed and others did not, because then a collective may be
    half done.
    """

    def __init__(self, size: int = 4, device: str = "cpu"):
        self.size, self.device = size, device
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = RUN_SECONDS,
    ) -> list[Any]:
        """Results of `fn(group, rank, *args)` on ranks 0..world_size-1 (default: all), in order.

        Arguments and results are pickled by value; tensors must be on the CPU. Each rank starts
        from `torch.manual_seed(0)` and this process' warning filters. A rank's exception is
        raised here. TimeoutError, with every rank's stack, after `timeout` seconds.
        """
        world_size = self.size if world_size is None else world_size
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must lie in [1, {self.size}], got {world_size}")
        try:
            if not self._workers:
                self._start()
            task = pickle.dumps((fn, args))
            for pipe in self._pipes[:world_size]:
                pipe.send((world_size, list(sys.path), warnings.filters, task))
            answers = self._collect(range(world_size), timeout, fn.__name__)
        except BaseException:
            self.close()
            raise
        errors = [value for ok, value in answers.values() if not ok]
        if errors:
            died = [error for error in errors if isinstance(error, RankDied)]
            if died or len(errors) < world_size or len({type(error) for error in errors}) > 1:
                self.close()
            raise (died or errors)[0]
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_serve,
                args=(rank, self.size, self.device, self._folder.name, theirs),
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(range(self.size), START_SECONDS, "starting the ranks")

    def _collect(self, ranks: range, timeout: float, what: str) -> dict[int, tuple[bool, Any]]:
        """One (succeeded, value) for each rank; fewer if a failed rank leaves others waiting."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                answers[waiting[pipe]] = self._answer(waiting[pipe])
                if not answers[waiting[pipe]][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                if any(not ok for ok, _ in answers.values()):
                    return answers
                late = sorted(waiting.values())
                raise TimeoutError(
                    f"{what}: no answer from ranks {late} after {timeout} s\n{self._stacks(late)}"
                )
        return answers

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, payload, text = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._workers[rank].join(GRACE_SECONDS)
            code = self._workers[rank].exitcode
            return False, RankDied(f"rank {rank} died with exit code {code}")
        if ok:
            return True, pickle.loads(payload)
        heading = f"rank {rank} failed:\n"
        try:
            error = pickle.loads(payload)
        except Exception:
            return False, RuntimeError(heading + text)
        error.__cause__ = RankTraceback(heading, text)
        return False, error

    def _stacks(self, ranks: list[int]) -> str:
        assert self._folder is not None
        for rank in ranks:
            pid = self._workers[rank].pid
            if pid is not None and self._workers[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = [(rank, Path(self._folder.name, f"stack{rank}")) for rank in ranks]
        return "\n".join(f"rank {r}:\n{file.read_text()}" for r, file in files if file.exists())


def _serve(rank: int, size: int, device: str, folder: str, pipe: Connection) -> None:
    """Main function of a pool process: it joins the group, then answers calls until killed."""
    import faulthandler

    torch.set_num_threads(1)
    # before Triton is imported; conftest.py sets it on the CPU
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    if sys.platform == "linux":  # not every host name resolves to an address of its host
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        options = {}
        if device == "cuda":
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=10),
            **options,
        )
        groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}
        groups[size] = dist.group.WORLD
        pipe.send((True, pickle.dumps(None), ""))
        while True:
            try:
                world_size, path, filters, task = pipe.recv()
            except EOFError:
                return
            sys.path[:] = path
            pipe.send(_call(task, groups[world_size], rank, filters))


def _call(task: bytes, group: Any, rank: int, filters: list[Any]) -> tuple[bool, bytes, str]:
    try:
        with warnings.catch_warnings():
            warnings.filters[:] = filters
            fn, args = pickle.loads(task)
            if "triton.runtime.interpreter" in sys.modules:
                from tests.support.interpreter import hasten

                hasten()
            torch.manual_seed(0)
            return True, pickle.dumps(fn(group, rank, *args)), ""
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(payload := pickle.dumps(error))
        except Exception:
            payload = b""
        return False, payload, text


def run_threads(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = RUN_SECONDS
) -> list[Any]:
    """Results of `fn(group, rank, *args)` on ranks that are threads of this process, in order.

    These work: all_gather, all_gather_single and all_gather_into_tensor, all_reduce, all_to_all,
    all_to_all_single, broadcast, reduce_scatter, gather, scatter, barrier, send, recv, isend,
    irecv, batch_isend_irecv; new_group and DeviceMesh. The exception of a rank is raised here;
    TimeoutError after `timeout` seconds.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    _register_threads_backend()
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()
    _Mail.boxes.clear()

    def body(rank: int) -> None:
        # This runs each backward in its rank's thread. The autograd engine has only one thread for
        # a device: a collective in it would wait for ranks that queue behind it.
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group("threads", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = fn(dist.group.WORLD, rank, *args)
            except SystemExit:
                pass  # collectives raise it once another rank has failed
            except BaseException as error:
                errors.append((rank, error))
                threaded.ProcessLocalGroup.exception_handle(error)
            finally:
                # A thread that continues after its time-out must not end a group of the main
                # program.
                if isinstance(dist.distributed_c10d._world, threaded.ThreadLocalWorld):
                    dist.destroy_process_group()

    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11: it cannot end a group without
        threaded.ThreadLocalWorld.comms = []
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        while any(t.is_alive() for t in threads) and time.monotonic() < deadline:
            threads[[t.is_alive() for t in threads].index(True)].join(0.05)
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late and not errors:
            frames = sys._current_frames()
            stacks = ["".join(traceback.format_stack(frames[threads[r].ident])) for r in late]
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            for rank in late:
                threads[rank].join(GRACE_SECONDS)
            raise TimeoutError(
                f"{getattr(fn, '__name__', fn)}: ranks {late} still run after {timeout} s\n"
                + "\n".join(stacks)
            )
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        isolate(False)
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on rank {rank} of {world_size} (threads)")
        raise error
    return results


class _Mail:
    """Messages that are on their way between threads, by (group, from, to, tag)."""

    boxes: ClassVar[dict[tuple[str, int, int, int], tuple[deque[Any], deque[Any]]]] = {}
    lock = threading.Lock()


@functools.cache
def _register_threads_backend() -> None:
    """Registers torch's group of threads with point-to-point calls, which it lacks."""
    from torch._C._distributed_c10d import _create_work_from_future
    from torch.futures import Future
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    class ThreadGroup(threaded.ProcessLocalGroup):
        def send(self, tensors, to, tag=0):
            return self._post((self.group_name, self.rank(), to, tag), tensors[0].clone(), None)

        def recv(self, tensors, sender, tag=0):
            return self._post((self.group_name, sender, self.rank(), tag), None, tensors[0])

        def _post(self, key, message, target):
            done = Future()
            with _Mail.lock:
                sent, wanted = _Mail.boxes.setdefault(key, (deque(), deque()))
                if message is not None:
                    sent.append(message)
                    done.set_result(None)
                else:
                    wanted.append((target, done))
                while sent and wanted:
                    into, arrived = wanted.popleft()
                    into.detach().copy_(sent.popleft())
                    arrived.set_result(None)
            return _create_work_from_future(done)

    def create(store, rank, world_size, timeout):
        group = ThreadGroup(rank, world_size)
        # Threads make groups at different times: a group may be used only once all have made it.
        threaded._store_based_barrier(rank, store, "", world_size, timeout)
        return group

    dist.Backend.register_backend("threads", create, devices=["cpu"])
