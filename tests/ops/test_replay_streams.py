"""Programs whose launches are on several streams; test_replay.py has the others."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fla_cp.replay import Replayed
from fla_cp.tape import active, closed, opened, step
from tests.support.recorded import N, compared, launch, plan_of


class Forks:
    """Streams as the Triton backend has them, numbered by their addresses."""

    def __init__(self, said):
        self.side = SimpleNamespace(cuda_stream=77)
        self.side_waits = lambda: said.append("side waits")
        self.main_waits = lambda: said.append("main waits")


def test_memory_of_a_side_stream_is_its_own_until_it_was_waited_for():
    said = []
    make = lambda address: Forks(said)  # noqa: E731

    def call(x):
        a, b, c, d, e = (torch.empty_like(x) for _ in range(5))
        launch(a, x)
        launch(b, a)  # a is free from here on, if the side stream did not start before
        if active() is not None:
            active().add_fork(0, 77, make)
        launch(c, b, stream=77)
        launch(d, x)
        if active() is not None:
            active().add_join(77)
        launch(e, c, d)
        return (e,)

    known = compared(call, N)
    assert said[:2] == ["side waits", "main waits"]
    assert known.bytes == 3 * 1024  # b, c and d at once; a shares with c or d


class Opened:
    """A side stream that a step returns, whose address is new in each call."""

    main = 0

    def __init__(self, said):
        self.cuda_stream = 1000 + len(said)
        self.wait = lambda: said.append("main waits")


def test_a_stream_that_a_step_opened_is_that_of_the_present_call():
    said = []

    def start(x):
        said.append("side waits")
        return x + 1.0, Opened(said)

    def call(x):
        a, b, c, d = (torch.empty_like(x) for _ in range(4))
        launch(a, x)
        y, side = step(start, x)
        opened(side)
        launch(b, a, y, stream=side.cuda_stream)
        launch(c, x)
        step(lambda side: side.wait(), side)
        closed(side)
        launch(d, b, c)
        return (d,)

    known = compared(call, N)
    assert said[:2] == ["side waits", "main waits"] and len(said) % 2 == 0
    assert known.bytes == 3 * 1024  # b and c are written at once, and a is read until the wait
    assert known.steps == 2 and "cuda_stream" in known.source


@pytest.mark.parametrize("first", ["fork", "step"])
def test_a_stream_that_is_both_forked_and_opened_is_not_recorded(first):
    """In another call, the two may be different streams."""
    side = Opened([])

    def fork():
        if active() is not None:
            active().add_fork(0, side.cuda_stream, lambda address: Forks([]))

    def call(x):
        a = torch.empty_like(x)
        y, found = step(lambda x: (x + 1.0, side), x)
        for kind in (first, "step" if first == "fork" else "fork"):
            if kind == "fork":
                fork()
            else:
                opened(found)
        launch(a, y, stream=side.cuda_stream)
        return (a,)

    with pytest.raises(AssertionError, match=r"that the call had forked|that a step opened"):
        compared(call, N)


def test_a_side_stream_of_no_step_is_not_recorded():
    def call(x):
        a = torch.empty_like(x)
        side = Opened([])
        opened(side)
        launch(a, x, stream=side.cuda_stream)
        closed(side)
        return (a,)

    with pytest.raises(AssertionError, match="no step"):
        compared(call, N)


@pytest.mark.parametrize(
    "forks, stream",
    [([(5, 5)], 5), ([(5, 7), (7, 8)], 8), ([(5, 7)], 9)],
    ids=["of itself", "of a fork", "unknown"],
)
def test_streams_that_a_program_could_not_find_again(forks, stream):
    def call(x):
        out = torch.empty_like(x)
        if active() is not None:
            for main, side in forks:
                active().add_fork(main, side, lambda address: Forks([]))
        launch(out, x, stream=stream)
        return (out,)

    plan, replayed = plan_of(), Replayed()
    for _ in range(4):
        x = torch.randn(N)
        (found,) = replayed(plan, None, [x], partial(call, x))
        assert torch.equal(found, x + 1)
    (known,) = replayed.known.values()
    assert "stream" in known
