"""The time that a step spends waiting for other ranks, measured at each wait."""

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

Moment = torch.cuda.Event | float
"""A point of the current stream of a CUDA device, or a time of the host in seconds."""


def moment(device: torch.device, *, in_graph: bool = False) -> Moment:
    """The present moment. in_graph: a CUDA graph is being captured. Each of its replays then
    records the event anew."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=in_graph)
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    """From one moment to a later one of the same kind; on CUDA this waits for the later one."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


class ExchangeTimer:
    """Sums the times of waits: host time on CPU, stream time between two events on CUDA.

    It also sums how long exchanges were under way, from when their messages left to the end of the
    wait. Work that ran in the meantime is part of that time. The wait itself is the part of an
    exchange that other work does not hide.

    in_graph: the waits are those of a CUDA graph that is being captured. Once the graph has been
    replayed, the sums are those of its latest replay.
    """

    def __init__(self, *, in_graph: bool = False) -> None:
        self.in_graph = in_graph
        self._waits: list[tuple[Moment, Moment]] = []
        self._spans: list[tuple[Moment, Moment]] = []
        self._replays: dict[ExchangeTimer, int] = {}

    def elapsed_ms(self) -> float:
        """Milliseconds of waiting so far; on CUDA this waits for the recorded events."""
        replayed = sum(n * graph.elapsed_ms() for graph, n in self._replays.items())
        return replayed + sum(milliseconds(*wait) for wait in self._waits)

    def under_way_ms(self) -> float:
        """Milliseconds for which exchanges were under way so far, measured in the same way."""
        replayed = sum(n * graph.under_way_ms() for graph, n in self._replays.items())
        return replayed + sum(milliseconds(*span) for span in self._spans)

    def add_replay(self, graph: "ExchangeTimer") -> None:
        """Adds the waits of a replay that has been queued. graph: the timer of the graph's capture.

        The next replay overwrites their times, so these must be read before. If a graph is added
        several times, the waits of its latest replay count as often.
        """
        self._replays[graph] = self._replays.get(graph, 0) + 1

    def moment(self, device: torch.device) -> Moment:
        """The present moment, of the kind that this timer needs."""
        return moment(device, in_graph=self.in_graph)

    @contextmanager
    def interval(self, device: torch.device, began: Moment | None = None) -> Iterator[None]:
        """Measures the block, which waits. began: when the messages left for which it waits."""
        begin = self.moment(device)
        yield
        end = self.moment(device)
        self._waits.append((begin, end))
        self._spans.append((begin if began is None else began, end))


@dataclass
class Waits:
    """The exchanges for which this process has waited. A thread that watches for long waits reads
    it.

    count: how many there were so far. now: what the present exchange moves; "" if there is none. On
    CUDA only the stream waits. The host is then rarely inside an exchange, and `count` is the
    number of waits that it has queued.
    """

    count: int = 0
    now: str = ""


waits = Waits()

_timer: ExchangeTimer | None = None


@contextmanager
def measure_exchange() -> Iterator[ExchangeTimer]:
    """Measures every wait for a state or halo exchange of this process inside the block.

    The timer is a global of the module, not a context variable: the backward on CUDA runs in
    threads of autograd, which inherit no context.
    """
    global _timer
    before, _timer = _timer, ExchangeTimer()
    try:
        yield _timer
    finally:
        _timer = before


def named(what: str) -> AbstractContextManager[object]:
    """Names a block in the trace of a profiler, if one records. torch's own context takes 30 us or
    more even if none does."""
    recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(f"fla_cp.{what}") if recorded else nullcontext()


def exchange_begins(device: torch.device) -> Moment | None:
    """The moment at which messages leave, for `exchange_wait`; None if nothing is measured."""
    return None if _timer is None else _timer.moment(device)


@contextmanager
def exchange_wait(
    device: torch.device, what: str = "exchange of states", began: Moment | None = None
) -> Iterator[None]:
    """Records a wait for other ranks in `measure_exchange`, the profiler's trace and `waits`.
    began: from `exchange_begins`."""
    waits.count += 1
    waits.now = what  # it stays after an error, and then says where the error was
    with named(what):
        if _timer is None:
            yield
        else:
            with _timer.interval(device, began):
                yield
    waits.now = ""


@dataclass
class GraphWaits:
    """The waits of a CUDA graph. count: how many it contains. timer: that of its capture; None if
    its events have no times."""

    timer: ExchangeTimer | None = None
    count: int = 0

    def replayed(self) -> None:
        """Counts a replay of the graph in `waits` and in `measure_exchange`."""
        waits.count += self.count
        if _timer is not None and self.timer is not None:
            _timer.add_replay(self.timer)


@contextmanager
def captured_exchange() -> Iterator[GraphWaits]:
    """Collects the waits of the block, in which a CUDA graph is captured: nothing waits there, but
    each replay of the graph will. Enter it before the capture begins."""
    global _timer
    timer = ExchangeTimer(in_graph=True) if graphs_have_times() else None
    found, count = GraphWaits(timer), waits.count
    before, _timer = _timer, timer
    try:
        yield found
    finally:
        _timer = before
        found.count, waits.count = waits.count - count, count


@functools.cache
def graphs_have_times() -> bool:
    """Whether the time between two events of a CUDA graph can be read after a replay, as a small
    graph shows. On ROCm they have none with torch 2.11, nor before ROCm 7."""
    try:
        x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        x.add_(1)  # loads the kernel, which a capture may not do
        # Other threads may copy batches or checkpoints meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            begin = moment(x.device, in_graph=True)
            x.add_(1)
            end = moment(x.device, in_graph=True)
        graph.replay()
        return milliseconds(begin, end) > 0
    except Exception:  # whatever it is, it must not keep a graph from being captured
        return False
