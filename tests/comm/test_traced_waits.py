"""Exchanges inside compiled graphs, as the timer, the trace and the watch see them."""

import time

import pytest
import torch

import fla_cp
from fla_cp.comm import captured_exchange, collectives, measure_exchange, traced_waits
from fla_cp.comm.timing import waits
from fla_cp.comm.traced_waits import STARTS, WHAT, visible, watch_graphs
from tests.support.clocks import HOST

T, LATE_S = 128, 1.0

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def late_rank(group, rank):
    """Of a compiled call, forward and backward, with rank 1 late in the last of three: the timer of
    each, how many waits it had, and the outputs and gradients."""
    context = fla_cp.build_cp_context(torch.tensor([0, 2 * T]), group, check=False)
    draw = torch.Generator().manual_seed(rank)
    shapes = *[(1, T, 2, 16)] * 4, (1, T, 2)
    x = [torch.rand(s, generator=draw).neg().requires_grad_() for s in shapes]

    def call(*x):
        return fla_cp.chunk_kda(*x, cp_context=context, use_qk_l2norm_in_kernel=True)[0]

    compiled, found = torch.compile(call, fullgraph=True, backend="aot_eager"), []
    for run in (call, compiled, compiled, compiled):
        torch.distributed.barrier(group)
        if len(found) == 3 and rank == 1:
            time.sleep(LATE_S)
        before = waits.count
        with measure_exchange() as timer, watch_graphs():
            o = run(*x)
            grads = torch.autograd.grad(o.square().sum(), x)
        timed = timer.elapsed_ms(), timer.under_way_ms(), waits.count - before
        found.append((*timed, waits.now, [o.detach(), *grads]))
    return found


def test_the_wait_for_a_late_rank_is_measured(gloo_pool):
    (eager, _, prompt, late), others = gloo_pool.run(late_rank, world_size=2)
    assert late[0] > 0.8e3 * LATE_S > prompt[0] > 0
    assert others[-1][0] < late[0] / 2
    for found in (prompt, late):
        assert found[1] >= found[0]
        assert found[2] == eager[2] == 2  # one in each direction
        assert found[3] == ""
        assert all(map(torch.equal, found[4], prompt[4]))
        torch.testing.assert_close(found[4], eager[4])


def traced(group, rank):
    """The names of a trace, and what was timed without `watch_graphs`."""
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)

    def rows(x):
        return collectives.all_gather_rows(x, 2, group.group_name).square()

    run = torch.compile(rows, fullgraph=True, backend="aot_eager")
    run(x).sum().backward()
    with torch.profiler.profile() as profile, watch_graphs():
        y = run(x)
        y.sum().backward()
    begin, count = time.perf_counter(), waits.count
    with measure_exchange() as timer:
        run(x).sum().backward()
        unseen = timer.elapsed_ms(), waits.count - count
        with watch_graphs():
            rows(x)  # as others call collectives of their own
    whole = 1e3 * (time.perf_counter() - begin)
    names = [event.key for event in profile.key_averages()]
    return y.detach(), names, unseen, timer.elapsed_ms(), waits.count - count, whole


def test_graphs_are_named_in_a_trace_and_others_left_alone(gloo_pool):
    for y, names, unseen, after, count, whole in gloo_pool.run(traced, world_size=2):
        assert y.tolist() == [[1.0] * 3] * 2 + [[4.0] * 3] * 2
        assert f"fla_cp.{WHAT}" in names
        assert unseen == (0, 0)
        assert after == count == 0 < whole


def captured(group, rank):
    """What a step's timer has after a compiled call as in a CUDA graph's capture, and after two
    replays of it; what the capture measured, in ms; and how many waits were counted."""
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)

    def rows(x):
        return collectives.all_gather_rows(x, 2, group.group_name).square()

    run, before = torch.compile(rows, fullgraph=True, backend="aot_eager"), waits.count
    with measure_exchange() as timer, watch_graphs():
        with captured_exchange(HOST, x.device) as found:
            sums = found.timer.sums
            sums.zero_()
            run(x).sum().backward()
        after, graph = (
            (timer.elapsed_ms(), timer.under_way_ms(), waits.count - before),
            sums.clone(),
        )
        for _ in range(2):
            with found.replayed():
                sums += graph
    step = timer.elapsed_ms(), timer.under_way_ms()
    return after, step, [1e-6 * ns for ns in graph.tolist()], waits.count - before


def test_the_capture_of_a_compiled_call_keeps_its_waits(gloo_pool):
    for after, step, graph, count in gloo_pool.run(captured, world_size=2):
        assert after == (0, 0, 0)
        assert step == pytest.approx([2 * ms for ms in graph]) and 0 < graph[0] <= graph[1]
        assert count == 2 * 2


def originals():
    return [vars(traced_waits._op(name))["_op"] for name in (*STARTS, "wait_tensor")]


def test_afterwards_the_ops_are_what_they_were():
    before = originals()
    with watch_graphs():
        outer = originals()
        assert not set(map(id, before)) & set(map(id, outer))
        with pytest.raises(KeyError), watch_graphs():
            raise KeyError
        assert originals() == outer
    assert originals() == before


def test_a_torch_that_hides_the_ops_stays_as_it_is(monkeypatch):
    assert visible()
    before = originals()
    monkeypatch.setattr(traced_waits, "_op", lambda name: object)
    assert not visible()
    with watch_graphs():
        monkeypatch.undo()
        assert originals() == before


def test_what_a_compiler_traces_is_not_timed():
    """Such tensors have no memory."""
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    functional = torch._to_functional_tensor(torch.zeros(3))
    for x in (fake, functional, torch.empty(3, device="meta"), None):
        assert traced_waits._address(x) == 0
    assert traced_waits._address(x := torch.zeros(3)) == x.data_ptr()
