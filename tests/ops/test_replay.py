"""Programs compute what the call computes that they were recorded from, at other addresses and with
other values (tests/support/recorded.py). test_replay_streams.py has those on several streams."""

import random
import subprocess
import sys
from functools import partial

import pytest
import torch

from fla_cp.partition.device_tables import Tabled
from fla_cp.program import Program, program
from fla_cp.replay import MAX_PROGRAMS, Replayed
from fla_cp.tape import NotReplayable, Tape, active, step
from fla_cp.tape_items import OfAddress
from tests.support.recorded import FIXED, N, compared, launch, plan_of


def test_kernels_ops_and_views():
    def call(x, y):
        a, b, c = x.new_empty(N), torch.empty_like(x), x.new_empty(3, N)
        launch(a, x, y)
        launch(b, a, factor=2.0)
        launch(c[0], b, a)
        launch(c[2], y)
        c[1].zero_()
        c[1].add_(b)
        total = c.sum(0)
        d = x.new_empty(2, N // 2)
        launch(d, total)
        return d.view(N // 2, 2), total[:3], None, c.T

    known = compared(call, N, N)
    assert known.launches == 5
    assert known.ops == 3


def test_memory_is_shared_by_pieces_that_are_not_needed_at_once():
    def call(x):
        for _ in range(20):
            y = torch.empty_like(x)
            launch(y, x)
            x = y
        return (y,)

    known = compared(call, N)
    assert known.bytes == 2048  # two pieces of 1024 bytes in turn; the last is the caller's
    assert known.allocations == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_kernels(seed):
    """Random kernels over random pieces, old and new."""

    def call(*inputs):
        rng, pieces = random.Random(seed), list(inputs)
        for _ in range(30):
            operands = rng.choices(pieces, k=rng.randint(1, 3))
            out = (
                torch.empty(N)
                if rng.random() < 0.6
                else rng.choice(pieces[len(inputs) :] or [torch.empty(N)])
            )
            if rng.random() < 0.2:
                out = operands[0] + operands[-1]
            elif any(out is x for x in operands):
                out = torch.empty(N)
                launch(out, *operands, factor=0.5)
            else:
                launch(out, *operands, factor=0.5)
            pieces.append(out)
        return tuple(rng.sample(pieces[len(inputs) :], 3))

    compared(call, N, N, N)


def test_a_step_runs_again_with_the_objects_of_the_present_plan():
    """A program recorded under one plan asks the plan of the present call for its exchange."""

    class Exchange:
        def __init__(self, factor):
            self.factor = factor

    def begin(exchange, x, pair):
        return {"factor": exchange.factor, "x": x * 1.0, "pair": pair}

    def end(pending, offset):
        return pending["x"] * pending["factor"] + pending["pair"][1] + offset, None

    def call(exchange, x):
        a = torch.empty_like(x)
        launch(a, x)
        pending = step(begin, exchange, a, (None, x))
        found, _ = step(end, pending, 3.0)
        b = torch.empty_like(x)
        launch(b, found)
        return b, found

    replayed = Replayed()
    for n in range(5):
        plan, x = plan_of(exchange=Exchange(float(n))), torch.randn(N)
        found = replayed(plan, None, [x], partial(call, plan.exchange, x))
        for a, b in zip(found, call(plan.exchange, x), strict=True):
            assert torch.equal(a, b)
    (known,) = replayed.known.values()
    assert known.steps == 2


class Framed(Tabled):
    """A packing of which all have the same sizes."""

    frame = "a frame"

    def __init__(self, values):
        self.values = values


def columns(packing):
    return packing.values, [2 * v for v in packing.values]


def test_tables_are_those_of_the_present_packing():
    def call(packing, x):
        first, second = packing.table(columns, torch.float32, x.device)
        out = torch.empty_like(x)
        launch(out, x, first, second)
        return (out,)

    replayed = Replayed()
    for n in range(5):
        plan, x = plan_of(packing=Framed([float(n + i) for i in range(N)])), torch.randn(N)
        (found,) = replayed(plan, None, [x], partial(call, plan.packing, x))
        assert torch.equal(found, call(plan.packing, x)[0])
    (known,) = replayed.known.values()
    assert isinstance(known, Program), known


def test_what_depends_on_the_packing_and_is_no_table_is_not_replayed():
    def call(packing, x):
        out = torch.empty_like(x)
        launch(out, x, torch.tensor(packing.values))
        return (out,)

    replayed = Replayed()
    for n in range(5):
        plan, x = plan_of(packing=Framed([float(n + i) for i in range(N)])), torch.randn(N)
        (found,) = replayed(plan, None, [x], partial(call, plan.packing, x))
        assert torch.equal(found, call(plan.packing, x)[0])
    (known,) = replayed.known.values()
    assert "depends on the packing" in known


@pytest.mark.parametrize(
    "read, why",
    [
        (lambda x: x.new_full((), x[0].item()), "reads values"),
        (lambda x: x.view(torch.int32), "another dtype"),
    ],
)
def test_what_a_tape_cannot_hold_runs_as_it_is(read, why):
    def call(x):
        out = torch.empty_like(x)
        launch(out, x)
        return out, read(out)

    plan, replayed = plan_of(), Replayed()
    for _ in range(4):
        x = torch.randn(N)
        found = replayed(plan, None, [x], partial(call, x))
        assert torch.equal(found[0], call(x)[0])
        assert torch.equal(found[1], call(x)[1])
    (known,) = replayed.known.values()
    assert why in known


def test_arguments_made_of_an_address():
    made = []

    class Make:
        many = True

        def __init__(self):
            self.found = {}

        def __call__(self, address):
            made.append(address)
            return [address, 5]

    seen = []

    def described(x, y, z, stream, function, metadata, launch, enter, leave, address, rows, factor):
        seen.append((address, rows, factor))

    make = Make()

    def call(x):
        if active() is not None:
            args = OfAddress(x, make), 2.0
            active().add_launch((described, FIXED), (1,), args, 0)
        return (x * 1.0,)

    plan, replayed = plan_of(), Replayed()
    for _ in range(4):
        x = torch.randn(N)
        replayed(plan, None, [x], partial(call, x))
    assert seen[-1] == (x.data_ptr(), 5, 2.0)
    assert made[-1] == x.data_ptr()
    make.found[x.data_ptr()] = [x.data_ptr(), 6]  # what is there is not made again
    replayed(plan, None, [x], partial(call, x))
    assert seen[-1] == (x.data_ptr(), 6, 2.0) and made.count(x.data_ptr()) == 1


def test_tensors_that_were_there_before_are_constants():
    kept = torch.randn(N)

    def call(x):
        out = torch.empty_like(x)
        launch(out, x, kept)
        return (out + kept,)

    compared(call, N)


def test_results_without_elements_are_new_each_time():
    def call(x):
        return x.new_empty(0, 3), x.new_empty(4)[:0]

    plan, replayed = plan_of(), Replayed()
    found = [
        replayed(plan, None, [torch.randn(N)], partial(call, torch.randn(N))) for _ in range(5)
    ]
    assert found[-1][0].shape == (0, 3) and found[-1][1].shape == (0,)
    assert found[-1][0] is not found[-2][0]


def test_an_input_may_be_a_result_and_shapes_of_inputs_may_be_views():
    def call(x):
        out = torch.empty(N)
        launch(out, x.view(-1)[4:])
        return x, out

    compared(call, (2, N))


def test_a_tape_that_failed_says_why():
    x = torch.randn(N)
    with Tape([x], {}, exact=False) as tape:
        torch.tensor([1.0]) + x
    with pytest.raises(NotReplayable, match="depends on the packing"):
        program(tape, [x])


def test_old_programs_are_forgotten():
    def call(x):
        return (x + 1,)

    plan, replayed = plan_of(), Replayed()
    for own in range(3 * MAX_PROGRAMS):
        x = torch.randn(N)
        replayed(plan, own, [x], partial(call, x))
    assert len(replayed.known) == MAX_PROGRAMS


def test_a_program_in_use_is_not_forgotten_for_new_ones():
    ran = []

    def call(key, x):
        ran.append(key)
        return (x + 1,)

    plan, replayed = plan_of(), Replayed()

    def again(key):
        x = torch.randn(N)
        (found,) = replayed(plan, key, [x], partial(call, key, x))
        assert found.equal(x + 1)

    for _ in range(2):
        again("in use")
    for new in range(3 * MAX_PROGRAMS):
        again(new)
        again("in use")
    assert ran.count("in use") == 2
    assert len(replayed.known) == MAX_PROGRAMS


def test_inputs_in_the_same_memory_are_told_apart():
    """A call was recorded with one tensor given twice; the next call has two."""

    def call(x, y):
        out = torch.empty(N)
        launch(out, x, factor=2.0)
        other = torch.empty(N)
        launch(other, y, out)
        return (other,)

    plan, replayed = plan_of(), Replayed()
    both = torch.randn(2 * N)
    for _ in range(3):  # views of one tensor
        x, y = both[:N], both[:N]
        replayed(plan, None, [x, y], partial(call, x, y))
    x, y = torch.randn(N), torch.randn(N)
    (found,) = replayed(plan, None, [x, y], partial(call, x, y))
    assert torch.equal(found, call(x, y)[0])
    x = torch.randn(N)
    plan, replayed = plan_of(), Replayed()
    for _ in range(3):  # the very same tensor
        replayed(plan, None, [x, x], partial(call, x, x))
    (found,) = replayed(plan, None, [x, y], partial(call, x, y))
    assert torch.equal(found, call(x, y)[0])


@pytest.mark.parametrize(
    "write",
    [lambda total, x: total.add_(x), lambda total, x: torch.add(total, x, out=total)],
    ids=["in place", "out"],
)
def test_a_tensor_of_host_values_that_is_written_is_not_a_constant(write):
    def call(x):
        total = torch.tensor([0.0] * N)
        write(total, x)
        return (total.clone(),)

    plan, replayed = plan_of(), Replayed()
    for _ in range(4):
        x = torch.randn(N)
        assert torch.equal(replayed(plan, None, [x], partial(call, x))[0], x)
    (known,) = replayed.known.values()
    assert "writes a tensor" in known


def test_a_result_is_new_each_time():
    def call(x):
        return (torch.tensor([1.0, 2.0]),)

    plan, replayed = plan_of(), Replayed()
    for _ in range(4):
        x = torch.randn(N)
        (found,) = replayed(plan, None, [x], partial(call, x))
        assert found.tolist() == [1.0, 2.0]
        found.zero_()  # as autograd does that adds to a gradient


def test_a_step_that_returns_a_number_is_not_replayed():
    """Python has one object for small numbers: others that are equal would be taken for it."""

    def call(x):
        seen.append(1)
        return (x + step(len, seen), x * 2)

    seen = []
    plan, replayed = plan_of(), Replayed()
    for n in range(1, 5):
        x = torch.randn(N)
        found = replayed(plan, None, [x], partial(call, x))
        assert torch.equal(found[0], x + n) and torch.equal(found[1], x * 2)


def test_recording_does_not_import_dynamo():
    """It would take a second of a process's first calls."""
    code = (
        "import sys, torch\n"
        "from fla_cp.tape import Tape\n"
        "x = torch.zeros(2, device='cpu')\n"
        "with Tape((x,), {}, exact=True) as tape: x + 1\n"
        "assert len(tape.items) == 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
