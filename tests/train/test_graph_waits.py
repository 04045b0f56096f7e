"""Waits for other ranks inside CUDA graphs. Stand-ins for events, graphs and the GPU's clock have
the time of a stream, which only the tests advance. What is captured is repeated at each replay."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fla_cp.comm import GraphClock, captured_exchange, measure_exchange, timing
from fla_cp.comm.timing import GraphTimer, exchange_begins, exchange_wait, waits
from fla_cp.tape import Tape
from fla_cp.train import graphs as training_graphs
from fla_cp.train.graphs import SEEN_BEFORE, Graph, Graphs
from fla_cp.train.parse import parse
from tests.support.loops import training_loop

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OFFSETS = (0, 384)


class Stream:
    """now: its time in ms. nodes: those of the graph that is being captured, else None. late: how
    long a wait takes."""

    def __init__(self):
        self.now, self.nodes, self.late = 0.0, None, 0.0

    def do(self, node):
        node() if self.nodes is None else self.nodes.append(node)

    def work(self, ms):
        self.do(lambda: self._pass(ms))

    def wait(self):
        self.do(lambda: self._pass(self.late))

    def _pass(self, ms):
        self.now += ms

    @contextmanager
    def capture(self, graph, **_):
        self.nodes = []
        try:
            yield
        finally:
            graph.nodes, self.nodes = self.nodes, None


def clock_of(stream):
    def write(now):
        stream.do(lambda: now.fill_(round(1e6 * stream.now)))

    def add(sums, began, begin):
        stream.do(lambda: sums.add_(round(1e6 * stream.now) - torch.cat([begin, began])))

    return GraphClock(write, add)


@pytest.fixture
def stream(monkeypatch):
    found = Stream()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            assert found.nodes is None, "an event in a graph"
            self.at = found.now

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    class CUDAGraph:
        def replay(self):
            for node in self.nodes:
                node()

        def reset(self):
            self.nodes = []

    for name in ("synchronize", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", found.capture)
    monkeypatch.setattr(training_graphs, "graph_clock", lambda device: clock_of(found))
    monkeypatch.setattr(timing, "_timer", None)
    return found


@pytest.fixture
def graphs(stream, monkeypatch):
    """`Graphs` of a micro-batch with two exchanges, whose messages leave 2 ms before the wait."""

    def eager(self, *given):
        for _ in range(2):
            began = exchange_begins(GPU)
            stream.work(2.0)
            with exchange_wait(GPU, began=began):
                stream.wait()
        return torch.zeros(())

    monkeypatch.setattr(Graphs, "_eager", eager)
    found = Graphs(torch.nn.Linear(1, 1))
    found.stream = stream
    return found


def step(graphs, *micro_batches):
    """Exposed and whole time of the exchanges of a step, and how many waits it had."""
    before = waits.count
    with measure_exchange() as timer:
        for late, offsets in micro_batches:
            graphs.stream.late = late
            context = SimpleNamespace(global_cu_seqlens=offsets, token_ranges=(((0, 384),),))
            graphs.loss(torch.zeros(1), torch.zeros(1), context, 1.0)
    return timer.elapsed_ms(), timer.under_way_ms(), waits.count - before


def test_each_replay_has_its_own_times(graphs):
    for n in range(SEEN_BEFORE + 4):  # eager steps, the one of the capture, and those after it
        assert step(graphs, (n, OFFSETS)) == (2 * n, 2 * n + 4, 2)
        assert bool(graphs.graphs) == (n >= SEEN_BEFORE)


def test_replays_of_a_step_add_up(graphs):
    """Also those of a graph whose times have been read before, and of steps after it."""
    for _ in range(SEEN_BEFORE + 1):
        step(graphs, (1.0, OFFSETS))
    for late in (3.0, 4.0):
        given = (50.0, OFFSETS), (late, OFFSETS), (7.0, OFFSETS)
        wait = 2 * (50.0 + late + 7.0)
        assert step(graphs, *given) == (wait, wait + 3 * 4.0, 6)


def test_a_step_can_be_read_after_the_next(graphs):
    for _ in range(SEEN_BEFORE + 1):
        step(graphs, (1.0, OFFSETS))
    (graph,), timers = graphs.graphs.values(), []
    for late in (3.0, 5.0):
        graphs.stream.late = late
        with measure_exchange() as timer:
            graph.replay(torch.zeros(1), torch.zeros(1), 1.0)
        timers.append(timer)
    assert [timer.elapsed_ms() for timer in timers] == [6.0, 10.0]


def test_graphs_and_eager_micro_batches_of_a_step_add_up(graphs):
    for _ in range(SEEN_BEFORE + 1):
        step(graphs, (1.0, OFFSETS), (1.0, (0, 100, 384)))
    assert len(graphs.graphs) == 2
    found = step(graphs, (3.0, OFFSETS), (5.0, (0, 100, 384)), (7.0, (0, 200, 384)))
    assert found == (2 * (3 + 5 + 7), 2 * (3 + 5 + 7) + 3 * 4, 6)


def test_a_step_that_is_not_measured_replays_as_well(graphs):
    for _ in range(SEEN_BEFORE + 1):
        step(graphs, (1.0, OFFSETS))
    (graph,), before = graphs.graphs.values(), waits.count
    graph.replay(torch.zeros(1), torch.zeros(1), 1.0)
    assert waits.count - before == 2 and timing._timer is None
    assert step(graphs, (3.0, OFFSETS)) == (6.0, 10.0, 2)  # without what was not measured


def test_without_a_clock_a_graph_is_captured_and_says_so(graphs, monkeypatch):
    monkeypatch.setattr(training_graphs, "graph_clock", lambda device: None)
    assert not graphs.hides_waits
    for _ in range(SEEN_BEFORE + 1):
        found = step(graphs, (1.0, OFFSETS))
    assert found == (0, 0, 2)  # the waits are counted, but have no times
    assert len(graphs.graphs) == 1 and graphs.hides_waits


def test_a_capture_that_fails_leaves_the_timer_and_the_count(stream):
    count = waits.count
    with measure_exchange() as timer:
        given = clock_of(stream), CPU
        with pytest.raises(KeyError), captured_exchange(*given), exchange_wait(GPU):
            raise KeyError
        assert timing._timer is timer
    assert waits.count == count


def test_metrics_are_null_where_a_graph_hides_waits(ranks, tmp_path):
    flags = "--device cpu --data synthetic --seq-len 512 --eval-every 0 --max-steps 2"
    sizes = "--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16"
    given = f"{flags} {sizes} --tracker none --cp 2 --cuda-graphs on --out {tmp_path}".split()
    with training_loop(parse(given), ranks) as (loop, _):
        assert loop.sees_exchanges
        measured = GraphTimer(GraphClock(lambda now: None, lambda *times: None), CPU)
        for timer, shown in ((measured, True), (None, False)):
            graph = Graph(*[None] * 6, waits=timing.GraphWaits(timer))
            loop.graphs.graphs = {OFFSETS: graph}
            assert loop.sees_exchanges == shown
        loop.graphs.graphs = {}


def test_a_tape_does_not_record_the_times_of_a_capture(stream):
    """Its program would write them to memory that is another one's by then."""
    with captured_exchange(clock_of(stream), CPU), Tape((), {}, exact=True) as tape:
        with exchange_wait(GPU, began=exchange_begins(GPU)):
            pass
        assert not (tape.items or tape.roots or tape.failed)
        torch.zeros(1)
        assert tape.items or tape.roots or tape.failed
