"""A decoding step in which one interpreted Gluon kernel runs layers that follow each other."""

import copy

import pytest
import torch

from fla_cp.nn.cache import RecurrentCache
from fla_cp.nn.decoding import LayersStep
from fla_cp.train import generate
from fla_cp.train.decoding import DecodeStep, Replayed, in_dtype
from fla_cp.train.generate import make_caches, next_logits
from tests.support.closeness import assert_within_budget
from tests.support.exported import VOCAB, random_model

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels.sm90 import rows_run, step_run
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tune

SIZES = "--model.layers 3 --model.hidden-size 64 --model.num-heads 2 --model.head-dim 16 "
KINDS = {
    "kda": ("--mixer kda", [3]),
    "gdn": ("--mixer gdn", [3]),
    "gla": ("--mixer gla", [3]),
    "attention between": ("--model.pattern kda,attention,kda", [1, 0, 1]),
    "two kinds": ("--model.pattern kda,kda,gdn", [2, 1]),
    "other stages": ("--mixer comba", [0, 0, 0]),
}
"""Flags, and how many layers each call of a step runs together; 0 for a block by itself."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(step_run, "APART", True)
    tune(monkeypatch, sms=7, gluon=True)


def together(step):
    return [len(s.layers) if isinstance(s, LayersStep) else 0 for s in step.steps]


def stepped(model, impl, rows=1):
    """A step behind a prompt of three tokens."""
    tokens, caches = torch.arange(3 * rows).view(rows, 3) % VOCAB, make_caches(model, rows, 8)
    next_logits(model, tokens, caches)
    step = DecodeStep(model, caches, rows, impl)
    step.tokens.copy_(tokens[:, 0])
    return step


def assert_steps_are_right(flags, wanted, rows):
    """Steps of a model in bf16, whose layers run together as `wanted`, against fp64."""
    model = in_dtype(random_model(f"{flags} --impl triton").eval(), torch.bfloat16)
    plain = in_dtype(random_model(f"{flags} --impl torch").eval(), torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    found = []
    for each, impl in ((model, "triton"), (plain, "torch"), (exact, "torch")):
        step = stepped(each, impl, rows)
        assert together(step) == (wanted if each is model else [0] * 3)
        for _ in range(3):
            logits = step()
        found.append(logits)
    assert_within_budget("logits", *(found[i] for i in (0, 2, 1)), factor=8.0)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_layers(kind):
    flags, wanted = KINDS[kind]
    with interpreted():
        assert_steps_are_right(f"{SIZES}{flags}", wanted, 1)


@pytest.mark.parametrize("kind", ["kda", "gdn", "gla", "two kinds"])
def test_steps_of_several_rows(kind, monkeypatch):
    """Layers whose kernels take up to 64 rows."""
    flags, wanted = KINDS[kind]
    flags = f"{SIZES}{flags} --model.head-dim 64"
    with interpreted():
        assert_steps_are_right(flags, wanted, 5)
        monkeypatch.setattr(rows_run, "ENABLED", False)
        assert_steps_are_right(flags, [0] * 3, 5)


def test_generated_tokens(monkeypatch):
    """Tokens of `generate` are the likeliest ones in fp64, or nearly so."""
    flags = f"{SIZES}--mixer kda"
    model = in_dtype(random_model(f"{flags} --impl triton").eval(), torch.bfloat16)
    exact = in_dtype(random_model(f"{flags} --impl torch").eval(), torch.bfloat16).double()
    made = []

    def step(*given):
        made.append(DecodeStep(*given, "triton"))
        return made[0]

    monkeypatch.setattr(generate, "DecodeStep", step)
    with interpreted():
        (tokens,), _ = generate.generate(model, [[1, 2, 3]], 4)
    assert together(*made) == [3] and len(tokens) == 4
    caches = make_caches(exact, 1, 8)
    given = torch.tensor([[1, 2, 3]])
    for token in tokens:
        logits = next_logits(exact, given, caches)[0]
        assert logits.max() - logits[token] <= 2e-2 * logits.abs().max()
        given = torch.tensor([[token]])


def test_other_steps_are_as_before(monkeypatch):
    """Those of few sequences, of smaller heads, in fp32, with a watched module, or without the
    kernels."""
    flags = f"{SIZES}--mixer kda --impl triton"
    single, model = random_model(flags).eval(), in_dtype(random_model(flags).eval(), torch.bfloat16)
    with interpreted():
        assert together(stepped(model, "triton", rows=2)) == [0] * 3
        assert together(stepped(model, "triton", rows=5)) == [0] * 3
        assert together(stepped(single, "triton")) == [0] * 3
        assert together(stepped(model, "triton")) == [3]
        model.blocks[1].ffn.up.register_forward_hook(lambda *_: None)
        assert together(stepped(model, "triton")) == [1, 0, 1]
        monkeypatch.setattr(step_run, "ENABLED", False)
        assert together(stepped(model, "triton")) == [0] * 3


def test_caches_that_were_replaced():
    """A step takes what is in the caches when it is called."""
    model = in_dtype(random_model(f"{SIZES}--mixer kda --impl triton").eval(), torch.bfloat16)
    with interpreted():
        step, same = (stepped(model, "triton") for _ in range(2))
        for cache in step.caches:
            cache.state = cache.state.clone()
        assert together(step) == [3]
        a, b = step().float(), same().float()
    torch.testing.assert_close(a, b, atol=2e-2 * b.abs().max().item(), rtol=0)
    for mine, theirs in zip(step.caches, same.caches, strict=True):
        torch.testing.assert_close(mine.state, theirs.state, atol=2e-2, rtol=2e-2)


@pytest.fixture
def several():
    """A model and steps of five rows: in kernels that do not write all states, and as calls of the
    blocks. Their tokens are always the same."""
    flags = f"{SIZES}--mixer kda --model.head-dim 64 --impl triton"
    model = in_dtype(random_model(flags).eval(), torch.bfloat16)
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        mine = stepped(model, "triton", 5)
        patch.setattr(rows_run, "ENABLED", False)
        theirs = stepped(model, "triton", 5)
        patch.undo()
        assert together(mine) == [3] and together(theirs) == [0] * 3
        yield model, mine, theirs


def assert_same_states(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.state, b.state, atol=2e-2, rtol=2e-2)


def unlike(caches, others):
    """How far the memory of caches is from the states of others."""
    return min((a._state - b._state).abs().max() for a, b in zip(caches, others, strict=True))


def test_states_that_are_read_stay_up_to_date(several):
    """Steps leave part of the states elsewhere until somebody reads them."""
    _, mine, theirs = several
    for _ in range(3):
        mine(), theirs()
    assert unlike(mine.caches, theirs.caches) > 0.05
    copies = copy.deepcopy(mine.caches)
    assert_same_states(copies, theirs.caches)
    mine()
    assert_same_states(copies, theirs.caches)
    theirs()
    states, others = ([c.state for c in step.caches] for step in (mine, theirs))
    shared = [copy.copy(c) for c in mine.caches]
    for n in range(4):
        for state in (*states, *others) if n == 2 else ():
            state[1] = 0  # a row begins anew
        mine(), theirs()
        for a, b, c in zip(states, others, shared, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
            assert c.state is a


def test_states_that_are_set_back(several):
    """The same tensor, with the values that it had two steps ago."""
    _, mine, theirs = several
    for step in (mine, theirs):
        step()
        states = [c.state for c in step.caches]
        before = [s.clone() for s in states], [c.conv.clone() for c in step.caches]
        step(), step()
        for cache, state, old, conv in zip(step.caches, states, *before, strict=True):
            cache.state = state.copy_(old)
            cache.conv.copy_(conv)
        step()
    assert_same_states(mine.caches, theirs.caches)


def test_caches_that_share_states(several):
    """Steps of both, in turns, read what the other ones wrote."""
    model, mine, theirs = several
    mine()
    shared = [RecurrentCache(c.conv, c.state) for c in mine.caches]
    other = DecodeStep(model, shared, 5, "triton")
    other.tokens.copy_(mine.tokens)
    assert together(other) == [3]
    for step in (other, mine, mine, other):
        step()
    for _ in range(5):
        theirs()
    assert_same_states(mine.caches, theirs.caches)


def test_calls_of_the_model_between_steps(several):
    """They read up-to-date states and replace them; steps then go on from the new ones."""
    model, mine, theirs = several
    more = torch.arange(20).view(5, 4) % VOCAB
    for steps in (2, 1):
        for _ in range(steps):
            a, b = mine().float(), theirs().float()
            torch.testing.assert_close(a, b, atol=4e-2 * b.abs().max().item(), rtol=0)
        a, b = (next_logits(model, more, step.caches).float() for step in (mine, theirs))
        torch.testing.assert_close(a, b, atol=4e-2 * b.abs().max().item(), rtol=0)
    assert_same_states(mine.caches, theirs.caches)


def test_steps_that_use_the_same_caches(several):
    """Whichever steps run next, they bring the states up to date that others have left."""
    model, mine, theirs = several
    mine()
    other = DecodeStep(model, mine.caches, 5, "triton")
    other.tokens.copy_(mine.tokens)
    assert together(other) == [3]
    before = mine.places()
    for step in (other, other, mine, other, mine, mine):
        step()
    assert mine.places() == before != [0] * len(before)
    for _ in range(7):
        theirs()
    assert unlike(mine.caches, theirs.caches) > 0.05
    assert_same_states(mine.caches, theirs.caches)
    other()
    assert mine.places() != before  # a graph of `mine` would have to be captured again


def test_no_graph_holds_what_other_steps_left(several):
    """A graph is captured only after steps that found the caches as the step before left them."""
    model, mine, _ = several
    other, calls = DecodeStep(model, mine.caches, 5, "triton"), []
    replayed = Replayed(mine, mine.tokens.device, True, mine.places)
    replayed._eager = lambda: calls.append("eager") or mine()
    replayed._capture = lambda: calls.append("captured")
    replayed(), replayed()
    other()
    replayed(), replayed()
    with pytest.raises(AssertionError):  # there is no graph on a CPU
        replayed()
    assert calls == ["eager"] * 4 + ["captured"]


def test_deep_copies_leave_states_to_later_steps(several):
    """Though those of the cache itself are written in each step."""
    model, mine, theirs = several
    states = [c.state for c in mine.caches]
    copies = copy.deepcopy(mine.caches)
    other = DecodeStep(model, copies, 5, "triton")
    other.tokens.copy_(mine.tokens)
    for _ in range(2):
        mine(), theirs(), other()
    assert unlike(copies, theirs.caches) > 0.05
    assert_same_states(copies, theirs.caches)
    for a, b in zip(states, theirs.caches, strict=True):
        torch.testing.assert_close(a, b.state, atol=2e-2, rtol=2e-2)


def test_copies_that_share_a_state_nobody_has_read(several):
    """Steps with the cache keep the state of its copy up to date, and the other way round."""
    model, mine, theirs = several
    mine(), theirs()
    shared = [copy.copy(c) for c in mine.caches]
    other = DecodeStep(model, shared, 5, "triton")
    other.tokens.copy_(mine.tokens)
    for step in (mine, mine, other, other, mine):
        step(), theirs()
        assert_same_states(shared, theirs.caches)
        assert_same_states(mine.caches, theirs.caches)
