"""Waits for other ranks inside CUDA graphs. Stand-ins for events and graphs have a clock instead of
a GPU: what is captured is repeated at each replay, and only external events are recorded anew."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fla_cp.comm import ExchangeTimer, captured_exchange, measure_exchange, timing
from fla_cp.comm.timing import exchange_begins, exchange_wait, waits
from fla_cp.train.graphs import SEEN_BEFORE, Graph, Graphs
from fla_cp.train.parse import parse
from tests.support.loops import training_loop

GPU = torch.device("cuda")
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


@pytest.fixture
def stream(monkeypatch):
    found = Stream()

    class Event:
        def __init__(self, enable_timing, external=False):
            assert enable_timing
            self.external, self.at = external, None

        def record(self):
            if found.nodes is not None and not self.external:
                return  # it would order streams inside the graph, and have no time
            found.do(lambda: setattr(self, "at", found.now))

        def synchronize(self):
            assert self.at is not None, "an event without a time"

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
    monkeypatch.setattr(timing, "graphs_have_times", lambda: True)
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


def test_the_last_replay_of_a_step_stands_for_those_before(graphs):
    for _ in range(SEEN_BEFORE + 1):
        step(graphs, (1.0, OFFSETS))
    assert step(graphs, (50.0, OFFSETS), (3.0, OFFSETS)) == (2 * 6.0, 2 * 10.0, 4)


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


def test_without_times_a_graph_is_captured_and_says_so(graphs, monkeypatch):
    monkeypatch.setattr(timing, "graphs_have_times", lambda: False)
    assert not graphs.hides_waits
    for _ in range(SEEN_BEFORE + 1):
        found = step(graphs, (1.0, OFFSETS))
    assert found == (0, 0, 2)  # the waits are counted, but have no times
    assert len(graphs.graphs) == 1 and graphs.hides_waits


def test_a_capture_that_fails_leaves_the_timer_and_the_count(stream):
    count = waits.count
    with measure_exchange() as timer:
        with pytest.raises(KeyError), captured_exchange(), exchange_wait(GPU):
            raise KeyError
        assert timing._timer is timer
    assert waits.count == count


def test_metrics_are_null_where_a_graph_hides_waits(ranks, tmp_path):
    flags = "--device cpu --data synthetic --seq-len 512 --eval-every 0 --max-steps 2"
    sizes = "--model.layers 1 --model.hidden-size 32 --model.num-heads 2 --model.head-dim 16"
    given = f"{flags} {sizes} --tracker none --cp 2 --cuda-graphs on --out {tmp_path}".split()
    with training_loop(parse(given), ranks) as (loop, _):
        assert loop.sees_exchanges
        for timer, shown in ((ExchangeTimer(in_graph=True), True), (None, False)):
            graph = Graph(*[None] * 6, waits=timing.GraphWaits(timer))
            loop.graphs.graphs = {OFFSETS: graph}
            assert loop.sees_exchanges == shown
        loop.graphs.graphs = {}


def test_a_small_graph_shows_whether_there_are_times():
    assert timing.graphs_have_times.__wrapped__() == torch.cuda.is_available()
