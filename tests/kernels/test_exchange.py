"""The exchange as one kernel, in Triton's interpreter: the ranks share a process and its memory.

In most tests, a rank's kernel runs to its end before the next one starts, in the direction of the
states, so no kernel waits. If one did, it would fail, since the interpreter has no clock. In one
test, ranks are processes whose kernels wait for each other.
tests/multi_gpu/one_gpu_exchange.py runs several ranks at the same time on a GPU.
"""

import dataclasses
import random
import time
import traceback
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor

from fla_cp.comm import Links, SlotMaps, Symmetric, affine, peer_memory
from fla_cp.comm.affine import PeerFold
from fla_cp.comm.peer_memory import Room, mailbox
from fla_cp.kernels.triton import exchange
from fla_cp.kernels.triton.exchange import fold
from fla_cp.partition.slots import link_slots
from tests.support import peers
from tests.support.closeness import assert_within_budget
from tests.support.one_memory import Neighbours, drawn, entering, in_line
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

SIZES = {"small": (2, 16, 16), "odd": (3, 24, 40), "blocks": (2, 96, 64), "large": (1, 128, 128)}
LINKS = {
    "two ranks": in_line(2),
    "one document": in_line(4),
    "two documents": in_line(4, 15),
    "an edge": in_line(4, 20),
    "in the middle": in_line(3, 13, 17),
    "one edge crossed": in_line(3, 5, 20),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def scaled(maps, n):
    return [m._replace(offset=m.offset * 2.0**n) for m in maps]


def run(ranks: Neighbours, links: Links, maps: list[SlotMaps]) -> list[torch.Tensor]:
    """One exchange of all ranks: the states that enter them, in the order of the ranks."""
    out = [torch.full_like(m.offset, torch.nan) for m in maps]
    for rank in links.owner:
        ranks.run(rank, links, maps[rank], out[rank])
    return out


def waits(error: BaseException | None) -> bool:
    """Whether a kernel failed in a wait. The interpreter wraps what each function raises."""
    if error is None:
        return False
    here = any(place.name == "wait_for" for place in traceback.extract_tb(error.__traceback__))
    return here or waits(error.__cause__)


def check(links, maps, found):
    exact, plain = (entering(links, maps, dtype) for dtype in (torch.float64, torch.float32))
    for rank, (x, want, usual) in enumerate(zip(found, exact, plain, strict=True)):
        assert_within_budget(f"rank {rank}", x, want, usual)


@pytest.mark.parametrize("size, name", crossed(SIZES, LINKS))
def test_states_that_enter(size, name):
    """Several exchanges in a row, forward and in reverse, of maps in every layout."""
    links, shape = LINKS[name], SIZES[size]
    maps = drawn(links.count, *shape, "cpu")
    ranks = Neighbours(links.count, *shape, "cpu")
    for n, way in enumerate((links, links, links.mirrored(), links, links.mirrored())):
        given = scaled(maps, n)
        if n == 2:  # as the backward gives them
            given = [m._replace(transition=m.transition.mT) for m in given]
        if n == 3:  # slices of a wire
            wires = [torch.cat((m.offset, m.transition), -1) for m in given]
            V = shape[-1]
            given = [SlotMaps(wire[..., V:], wire[..., :V]) for wire in wires]
        check(way, given, run(ranks, way, given))


def test_ranks_without_a_transition():
    """A rank through which no document passes need not give one."""
    links, shape = in_line(3, 15), (2, 16, 16)
    maps = drawn(3, *shape, "cpu")
    maps = [m._replace(transition=None) for m in maps]
    check(links, maps, run(Neighbours(3, *shape, "cpu"), links, maps))


def test_the_table_decides_while_launches_stay_the_same():
    """A captured exchange serves other packings: their tables are written in place."""
    shape = (1, 16, 16)
    fixed = [
        dataclasses.replace(in_line(3, *cuts), fixed=True) for cuts in ((), (15,), (10, 20), ())
    ]
    maps, ranks = drawn(3, *shape, "cpu"), Neighbours(3, *shape, "cpu")
    before = fixed[0]
    check(before, maps, run(ranks, before, maps))
    tables = {at for table in before._on_devices.values() for at in table.addresses}
    for links in fixed[1:]:
        links.take_tables(before)
        check(links, maps, run(ranks, links, maps))
        found = {at for table in links._on_devices.values() for at in table.addresses}
        assert found == tables
        before = links


def test_a_rank_runs_two_exchanges_ahead_and_no_further():
    """It needs nothing of the others itself, but must not write over what they have not read."""
    links, shape, gone = in_line(3), (2, 24, 16), []
    maps, ranks = drawn(3, *shape, "cpu"), Neighbours(3, *shape, "cpu")
    for n in range(2):
        given = scaled(maps, n)
        gone.append((given, [ranks.run(0, links, given[0], torch.zeros_like(maps[0].offset))]))
    with pytest.raises(InterpreterError) as failed:
        ranks.run(0, links, maps[0], torch.zeros_like(maps[0].offset))
    assert waits(failed.value)
    for given, found in gone:
        for rank in (1, 2):
            found.append(ranks.run(rank, links, given[rank], torch.zeros_like(maps[0].offset)))
        check(links, given, found)
    check(links, maps, run(ranks, links, maps))


def at_the_same_time(group, rank, folder, ways):
    """Runs exchanges in memory that the ranks' processes share; returns how often it waited."""
    R, shape, rng, waits = group.size(), (2, 16, 32), random.Random(rank), []
    maps, ranks = drawn(R, *shape, "cpu"), Neighbours(R, *shape, "cpu", folder)
    both = in_line(R), in_line(R).mirrored()

    def clock():
        waits.append(1)
        return time.perf_counter_ns()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "globaltimer", clock)
        # it would copy all memory onto itself, and so undo what others write meanwhile
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
        found = []
        for n, way in enumerate(ways):
            time.sleep(rng.choice((0, 0, 0.02)))
            given = maps[rank]._replace(offset=maps[rank].offset * 2.0 ** (n % 5))
            found.append(ranks.run(rank, both[way], given, torch.zeros_like(given.offset)))
    exact, plain = ([entering(w, maps, d) for w in both] for d in (torch.float64, torch.float32))
    for n, (way, x) in enumerate(zip(ways, found, strict=True)):
        want, usual = (states[way][rank] * 2.0 ** (n % 5) for states in (exact, plain))
        assert_within_budget(f"rank {rank}, exchange {n}", x, want, usual)
    return len(waits)


def test_kernels_wait_for_each_other(gloo_pool, tmp_path):
    """Exchanges in random directions, without any other wait between the ranks."""
    rng = random.Random(0)
    ways = [rng.randrange(2) for _ in range(30)] + [0] * 15
    room = Room(*fold.room(2, 16, 32))
    for rank in range(4):
        (tmp_path / str(rank)).write_bytes(bytes(4 * room.elements))
    waits = gloo_pool.run(at_the_same_time, str(tmp_path), ways, world_size=4)
    assert all(waits), waits  # also the first rank, for those after it


def test_numbers_overflow():
    links, shape = in_line(2), (1, 16, 16)
    maps, ranks = drawn(2, *shape, "cpu"), Neighbours(2, *shape, "cpu")
    last = 2**31 - 3
    ranks.numbers.fill_(last)
    for boxes in ranks.boxes.values():
        for box in boxes:
            for flags in (box.arrived, box.read):
                if flags is not None:
                    flags.fill_(last)
    for n in range(5):
        given = scaled(maps, n)
        check(links, given, run(ranks, links, given))
    assert ranks.numbers[0, 0, 0] == last + 5 - 2**32


@pytest.mark.parametrize("reverse", [False, True])
def test_a_mailbox_is_that_of_its_neighbours(reverse):
    room = Room(64, 3)
    memory = [torch.zeros(room.elements) for _ in range(3)]
    number = torch.zeros(3, dtype=torch.int32)
    boxes = [mailbox(memory, number, r, room, reverse=reverse) for r in range(3)]
    order = boxes[::-1] if reverse else boxes
    for a, b in pairwise(order):
        for mine, theirs in (
            (a.next_inbox, b.inbox),
            (a.next_arrived, b.arrived),
            (a.read, b.previous_read),
        ):
            assert mine.data_ptr() == theirs.data_ptr()
            assert mine.data_ptr() % 16 == 0
    assert order[0].inbox is order[0].arrived is order[0].previous_read is None
    assert order[-1].read is order[-1].next_inbox is order[-1].next_arrived is None
    held = [x for box in boxes for x in (box.inbox, box.arrived, box.read) if x is not None]
    other = [mailbox(memory, number, r, room, reverse=not reverse) for r in range(3)]
    held += [x for box in other for x in (box.inbox, box.arrived, box.read) if x is not None]
    for n, x in enumerate(held, 1):
        x.fill_(n)
    assert all((x == n).all() for n, x in enumerate(held, 1))  # no two overlap


def passed_on(group, rank, maps, exact, plain):
    """`Symmetric` with the kernel: documents over contiguous ranges, in both directions."""
    links = in_line(group.size(), 7)
    for n, way in enumerate((links, links.mirrored()) * 2):
        found = Symmetric(group).start(maps[rank], way, fold).wait()
        assert_within_budget(f"{n}", found, exact[n % 2][rank], plain[n % 2][rank])
    box = peer_memory.mailboxes(group, Room(*fold.room(*maps[rank].offset.shape[1:])))
    inboxes = (half[: 2 * box.room.size] for half in box.memory[rank].chunk(2))
    return [int(x.isfinite().sum()) for x in inboxes]


@pytest.mark.parametrize("R", [2, 4])
def test_ranks_with_one_slot_pass_the_state_on(monkeypatch, R):
    """Each rank receives one state a direction, as docs/design.md says."""
    peers.of_threads(monkeypatch)
    shape = (2, 32, 16)
    maps = drawn(R, *shape, "cpu")
    ways = in_line(R, 7), in_line(R, 7).mirrored()
    exact, plain = ([entering(w, maps, d) for w in ways] for d in (torch.float64, torch.float32))
    received = run_threads(passed_on, R, maps, exact, plain)
    size = 2 * maps[0].offset.numel()  # two exchanges a direction, in two places
    assert received == [[0, size], *[[size, size]] * (R - 2), [size, 0]]


def reads(group, rank, links, maps):
    """Whether peers' maps are read, by a fold that must not be asked to pass states on."""

    def refuse(*given):
        raise AssertionError("passes states on")

    only_fold = PeerFold(affine.fold, refuse, refuse)
    found = Symmetric(group).start(maps[rank], links, only_fold).wait()
    same = Symmetric(group).start(maps[rank], links, affine.fold).wait()
    return torch.equal(found, same)


@pytest.mark.parametrize("how", ["two slots", "another order", "an empty rank", "fp64"])
def test_other_ranks_read_their_peers_maps(monkeypatch, how):
    peers.of_threads(monkeypatch)
    slots, dtype = {
        "two slots": ((((0, 10), (30, 40)), ((10, 20), (20, 30))), torch.float32),
        "another order": ((((10, 20),), ((0, 10),), ((20, 40),)), torch.float32),
        "an empty rank": ((((0, 20),), ((20, 20),), ((20, 40),)), torch.float32),
        "fp64": ((((0, 20),), ((20, 40),)), torch.float64),
    }[how]
    links, J = link_slots((0, 40), slots), len(slots[0])
    gen = torch.Generator().manual_seed(0)
    maps = [
        SlotMaps(*(torch.randn(J, 2, 4, n, generator=gen, dtype=dtype) for n in (4, 3)))
        for _ in slots
    ]
    assert all(run_threads(reads, len(slots), links, maps))
