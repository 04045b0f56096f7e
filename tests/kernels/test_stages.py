"""Each torch stage and its adjoint against autograd of a plain composition, and the fold."""

import pytest
import torch

from fla_cp.comm import Links, Local
from fla_cp.comm.carry import AffineMap, States, carry
from fla_cp.kernels.torch.gate import GATES, activate, activate_bwd, l2norm, l2norm_bwd
from fla_cp.kernels.torch.intra import Inputs, Spec, intra, intra_bwd, scores, to_chunks, to_tokens
from fla_cp.kernels.torch.scan import output, output_bwd, scan, scan_bwd, summarize, summarize_bwd
from fla_cp.kernels.torch.scores import gram, gram_bwd
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.cases import Case
from tests.support.closeness import assert_exact

F64 = torch.float64
RULE = DeltaRule(scale=0.5)
ALONE = {"want_start": True, "concurrent": False}
OFFSETS = {"one": (0, 200), "packed": (0, 1, 65, 65, 200, 210), "short": (0, 3)}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def packed_inputs(T, HV=2):
    x = Case("x", T=T, H=1, HV=HV, K=5, V=4, states=False).inputs()
    return Inputs(*(t[0] for t in x.values()), None, None)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gate_adjoint(bound, with_bias):
    rule = DeltaRule(scale=1.0, gate="softplus" if bound is None else "sigmoid", lower_bound=bound)
    g, A_log = draw(30, 2, 3).requires_grad_(), draw(2, seed=1).requires_grad_()
    bias = draw(6, seed=2).requires_grad_() if with_bias else None
    dg = draw(30, 2, 3, seed=3)
    wanted = [t for t in (g, A_log, bias) if t is not None]
    exact = torch.autograd.grad(activate(rule, g, A_log, bias), wanted, dg)
    actual = [t for t in activate_bwd(rule, g, A_log, bias, dg) if t is not None]
    for a, b in zip(actual, exact, strict=True):
        assert_exact("gradient", a, b)


def test_every_gate_is_negative_and_named():
    for gate in GATES.values():
        assert (gate.value(draw(100), torch.tensor(2.0, dtype=F64), -5.0) <= 0).all()


def test_l2norm_adjoint():
    x, dy = draw(7, 5).requires_grad_(), draw(7, 5, seed=1)
    y, rstd = l2norm(x)
    assert_exact("norm", y.norm(dim=-1), torch.ones(7, dtype=F64) * y.norm(dim=-1))
    assert_exact("dx", l2norm_bwd(y, rstd, dy), torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1, 50.0])
def test_gram_and_adjoint(diagonal, decay):
    x, y = (draw(3, 64, 5, seed=s).requires_grad_() for s in (0, 1))
    gc = (-draw(3, 64, 5, seed=2).abs() * decay).cumsum(-2)
    difference = (gc[:, :, None] - gc[:, None]).clamp(max=0)
    plain = torch.einsum("cik,cjk,cijk->cij", x, y, difference.exp())
    plain = plain.tril(0 if diagonal else -1)
    dA = draw(3, 64, 64, seed=3)
    exact = torch.autograd.grad(plain, (x, y), dA)
    x, y = x.detach(), y.detach()
    assert_exact("A", gram(x, y, gc, gc, torch.exp, diagonal=diagonal), plain)
    for a, b in zip(gram_bwd(dA, x, y, gc, gc, torch.exp, diagonal=diagonal), exact, strict=True):
        assert_exact("gradient", a, b)


@pytest.mark.parametrize("name", OFFSETS)
def test_chunk_layout_is_undone(name):
    packing = Packing.build(OFFSETS[name])
    x = draw(packing.tokens, 2, 3)
    chunks = to_chunks(x, packing)
    assert torch.equal(to_tokens(chunks, packing), x)
    assert chunks.square().sum() == pytest.approx(x.square().sum().item())  # padding is zero


@pytest.mark.parametrize("name", OFFSETS)
def test_intra_solves_its_triangular_system(name):
    packing = Packing.build(OFFSETS[name])
    x = packed_inputs(packing.tokens)
    spec = Spec(RULE, packing)
    c = scores(spec, intra(spec, x))
    A = gram(c.beta * c.k, c.k, c.gc, c.gc, RULE.exp, diagonal=False)
    eye = torch.eye(64, dtype=F64).expand_as(A)
    assert_exact("T", c.T @ (eye + A), eye.contiguous())
    assert_exact("u", (eye + A) @ c.u, c.beta * c.v)
    assert_exact("w", (eye + A) @ c.w, c.beta * c.k * RULE.exp(c.gc))
    assert_exact("kg", c.kg * RULE.exp(c.gc), c.k * c.decay[:, :, None])


@pytest.mark.parametrize("name", OFFSETS)
def test_scan_output_and_their_adjoints(name):
    """The pair (scan, output) as a function of q, k, v, g, beta and S0, against autograd."""
    packing = Packing.build(OFFSETS[name], segment_chunks=1)
    x = [t.requires_grad_() for t in packed_inputs(packing.tokens)[:5]]
    S0 = draw(len(packing.segments), 2, 5, 4, seed=5).requires_grad_()
    outputs, ends = [], []
    for i, s in enumerate(packing.segments):  # token by token, each segment on its own
        S = S0[i]
        for t in range(s.start, s.stop):
            q, k, v, g, beta = (y[t] for y in x)
            S = g.exp()[..., None] * S
            q, k = q.expand(2, -1), k.expand(2, -1)
            read = torch.einsum("hk,hkv->hv", k, S)
            S = S + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - read))
            outputs.append(RULE.scale * torch.einsum("hk,hkv->hv", q, S))
        ends.append(S)
    o, S_end = torch.stack(outputs), torch.stack(ends)
    do, dS = draw(*o.shape, seed=6), draw(*S_end.shape, seed=7)
    exact = torch.autograd.grad([o, S_end], [*x, S0], [do, dS])

    everything = tuple(range(len(packing.segments)))
    inputs = Inputs(*(t.detach() for t in x), None, None)
    spec = Spec(RULE, packing)
    c = scores(spec, intra(spec, inputs))
    h, v_new, last = scan(spec, c, States(everything, S0.detach()))
    assert_exact("o", output(spec, c, h, v_new), o.detach())
    assert_exact("S_end", last, S_end.detach())
    dout = output_bwd(spec, c, do)
    dscan, dS0 = scan_bwd(spec, inputs, dout, States(everything, dS), **ALONE)
    grads = intra_bwd(spec, inputs, c, (h, v_new), dscan)
    assert_exact("dS0", dS0, exact[-1])
    for label, a, b in zip(Inputs._fields[:5], grads[:5], exact[:5], strict=True):
        assert_exact(f"d{label}", a, b)


def run_segments(cu, size):
    """Entry states and adjoints of every segment, by summaries and by one long scan."""
    packing = Packing.build(cu, segment_chunks=size)
    x = packed_inputs(cu[-1])
    spec = Spec(RULE, packing)
    c = scores(spec, intra(spec, x))
    begin = draw(len(packing.beginning), 2, 5, 4, seed=1)
    seeds = States(packing.beginning, begin)
    one_slot = Links((0,), (0,), (False,), (False,), 1)
    maps = summarize(spec, c, seeds)
    like = begin.new_empty(0)
    states = carry(maps, packing, one_slot, Local(), (2, 5, 4), like)()
    do, dend = draw(cu[-1], 2, 4, seed=2), draw(len(packing.ending), 2, 5, 4, seed=3)
    dout = output_bwd(spec, c, do)
    ends = States(packing.ending, dend)
    offset = summarize_bwd(spec, dout, ends, concurrent=False)
    adjoint = AffineMap(maps.transition, offset)
    dstates = carry(adjoint, packing, one_slot, Local(), (2, 5, 4), like, reverse=True)()
    return spec, c, seeds, states, dout, ends, dstates


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cu", [(0, 400), (0, 70, 330, 331, 500)], ids=str)
def test_summaries_give_the_states_between_segments(cu, size):
    spec, c, seeds, states, dout, ends, dstates = run_segments(cu, size)
    packing = spec.packing
    assert states.segments == packing.carried
    assert dstates.segments == packing.feeding
    everything = States(seeds.segments + states.segments, torch.cat([seeds.value, states.value]))
    _, _, S_end = scan(spec, c, everything)
    for i, S in zip(states.segments, states.value, strict=True):
        assert_exact(f"state entering {i}", S, S_end[i - 1])
    everything = States(ends.segments + dstates.segments, torch.cat([ends.value, dstates.value]))
    _, dS0 = scan_bwd(spec, packed_inputs(cu[-1]), dout, everything, **ALONE)
    for i, dS in zip(dstates.segments, dstates.value, strict=True):
        assert_exact(f"gradient leaving {i}", dS, dS0[i + 1])


def test_only_segments_between_others_get_a_transition():
    spec, c, seeds, *_ = run_segments((0, 70, 330, 331, 500), 1)
    maps, packing = summarize(spec, c, seeds), spec.packing
    assert len(maps.transition) == len(packing.middle)
    assert len(maps.offset) == len(packing.feeding)
    assert [packing.segments[i].sequence for i in packing.middle] == [1, 1, 1, 3]


def test_whole_sequences_are_not_summarised():
    spec = Spec(RULE, Packing.build((0, 70, 330)))
    maps = summarize(spec, intra(spec, packed_inputs(330)), None)
    assert maps == (None, None)
    assert spec.packing.chains == ()


def test_rows_of_bundles_have_no_stride_of_one():
    from fla_cp.kernels.triton.device.bundles import rows

    assert rows(None) == (None, 0, 0)
    for x in (torch.rand(5, 1, 1), torch.rand(5, 3, 1), torch.rand(5, 4)[:, None, :1]):
        ptr, row, head = rows(x)
        assert 1 not in (row, head)
        assert torch.equal(torch.as_strided(ptr, x.shape, (row, head, 1), ptr.storage_offset()), x)
    x = torch.rand(5, 3, 4)
    assert rows(x).ptr is x
