"""chunk_size: every operator in chunks of 16, 32 and 64 tokens, as asked."""

from itertools import pairwise

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context, chunk_gla, chunk_kda, zigzag_token_ranges
from fla_cp.kernels.torch.backend import TorchBackend
from fla_cp.reference import recurrence
from fla_cp.rule import CHUNK_SIZES
from tests.support.closeness import assert_exact
from tests.support.members import BY_NAME, Call, draw, oracle, run
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

F64 = torch.float64
PACKED = (0, 1, 66, 66, 83, 200)
CALLS = {
    "one": Call(T=131, decay=1e-3),
    "rows": Call(T=67, B=2, HV=2),
    "packed": Call(T=200, cu=PACKED, inside=True),
    "kept": Call(T=97, inside=True, options=(("disable_recompute", True),)),
}


@pytest.fixture
def formed(monkeypatch):
    """The lengths of the chunks that were formed on the torch backend."""
    found, form = set(), TorchBackend.prepare_chunks

    def noted(self, spec, *rest):
        found.add(spec.packing.chunk)
        return form(self, spec, *rest)

    monkeypatch.setattr(TorchBackend, "prepare_chunks", noted)
    return found


@pytest.mark.parametrize("name, call, size", crossed(BY_NAME, CALLS, CHUNK_SIZES))
def test_equals_the_recurrence(name, call, size, formed):
    member, call = BY_NAME[name], CALLS[call]
    actual = run(member, call, chunk_size=size)
    assert formed == {size}
    for key, exact in oracle(member, call).items():
        assert_exact(key, actual[key], exact)


def states_of(x, offsets, size):
    """The states before tokens 0, size, 2 size, .. of each sequence."""
    found = []
    for n, (start, stop) in enumerate(pairwise(offsets)):
        for token in range(start, stop, size):
            before = {k: t[:, start:token] for k, t in x.items() if k != "initial_state"}
            first = x["initial_state"][n : n + 1]
            found.append(recurrence(**before, initial_state=first)[1] if token > start else first)
    return torch.cat(found)


@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_states_are_those_of_every_chunk(size):
    x, _, _ = draw(BY_NAME["kda"], Call(T=200, cu=PACKED))
    *_, h = chunk_kda(
        **x, cu_seqlens=torch.tensor(PACKED), return_intermediate_states=True, chunk_size=size
    )
    assert_exact("h", h[0], states_of(x, PACKED, size))


def test_wide_heads():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 1, 300, generator=gen, dtype=F64) for _ in "qkv")
    found = chunk_gla(q, k, v, -q.abs(), return_intermediate_states=True, chunk_size=16)
    plain = chunk_gla(q, k, v, -q.abs())
    assert found[2].shape[1] == 5
    assert_exact("o", found[0], plain[0])


OTHERS = [48, 128, 0, -16, 16.0, True, "16", torch.tensor(16), [16]]


@pytest.mark.parametrize("bad", OTHERS, ids=str)
def test_other_sizes_are_refused(bad):
    x, _, _ = draw(BY_NAME["kda"], Call(T=3))
    for _ in range(2):  # no later call takes the first one's checks for its own
        with pytest.raises(ValueError, match=r"^chunk_size must be 16, 32, 64 or None, got"):
            chunk_kda(**x, chunk_size=bad)


def test_recurrences_have_no_chunks():
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        run(BY_NAME["kda"], Call(T=3), form="fused_recurrent", chunk_size=16)


def outputs(member, x, flows, **more):
    """o, the final states if they are wanted, and the gradients of x."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    arguments = [leaves.pop(n) for n in member.arguments]
    op = getattr(fla_cp, f"chunk_{member.name}")
    found = [t for t in op(*arguments, *member.extra, **leaves, **more) if t is not None]
    grads = torch.autograd.grad(found, [*arguments, *leaves.values()], flows[: len(found)])
    return [t.detach() for t in found] + list(grads)


def under_a_context(group, rank, name, size, where):
    """A rank's results are those of one rank. where: the name of an exchange, "zigzag", or "fixed",
    a context of fixed shape, which has no states. One rank has chunks of 64."""
    member = BY_NAME[name]
    call = Call(T=200, cu=PACKED, decay=0.01, states=where != "fixed")
    x, keywords, (do, dfinal) = draw(member, call)
    keywords["output_final_state"] = where != "fixed"
    cu = torch.tensor(PACKED)
    whole = outputs(member, x, [do, dfinal], cu_seqlens=cu, **keywords)
    if where == "zigzag":
        context = build_cp_context(cu, group, token_ranges=zigzag_token_ranges(200, group.size()))
    elif where == "fixed":
        context = build_cp_context(torch.tensor([0, 200]), group, max_sequences=6)
    else:
        context = build_cp_context(cu, group, exchange=where)

    def mine(t):
        rows = t.unflatten(1, (200, -1)) if t.shape[1] != 200 else t
        part = context.shard(rows)
        return part if rows is t else part.flatten(1, 2)

    shared = [n == "initial_state" for n in x]
    own = {n: t if n == "initial_state" else mine(t) for n, t in x.items()}
    given = member, own, [mine(do), dfinal]
    keywords |= {"cp_context": context, "chunk_size": size}
    if where == "fixed":  # the tables of this packing are overwritten
        outputs(*given, **keywords)
        context.update(cu)
    found = outputs(*given, **keywords)
    alike = [False, *([] if where == "fixed" else [True]), *shared]
    for n, (a, b, same) in enumerate(zip(found, whole, alike, strict=True)):
        assert_exact(f"result {n} of rank {rank}", a, b if same else mine(b))


WHERE = ["all_gather", "ring", "scan", "heads", "zigzag", "fixed"]


@pytest.mark.parametrize("name, where, size", crossed(BY_NAME, WHERE, (16, 32)))
def test_ranks_equal_one_rank(name, where, size, formed):
    run_threads(under_a_context, 3, name, size, where)
    assert formed == {64, size}


def states_on_ranks(group, rank, size):
    x, _, _ = draw(BY_NAME["kda"], Call(T=200, cu=PACKED, decay=0.01))
    context = build_cp_context(torch.tensor(PACKED), group)
    mine = {n: t if n == "initial_state" else context.shard(t) for n, t in x.items()}
    *_, h = chunk_kda(**mine, cp_context=context, return_intermediate_states=True, chunk_size=size)
    ((start, stop),) = context.token_ranges[rank]
    edges = [(max(a, start), min(b, stop)) for a, b in pairwise(PACKED)]
    exact = []
    for n, (first, last) in enumerate(edges):
        for token in range(first, last, size):
            before = {k: t[:, PACKED[n] : token] for k, t in x.items() if k != "initial_state"}
            state = x["initial_state"][n : n + 1]
            if token > PACKED[n]:
                state = recurrence(**before, initial_state=state)[1]
            exact.append(state)
    assert_exact("h", h[0], torch.cat(exact))


@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_states_of_chunks_on_ranks(size):
    """A rank's chunks begin at the first of its own tokens of a sequence."""
    run_threads(states_on_ranks, 3, size)
