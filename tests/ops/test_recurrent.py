"""fused_recurrent_kda: each backend against the fp64 recurrence, and as a decoder uses it."""

import os

import pytest
import torch

from fla_cp import chunk_kda, fused_recurrent_kda
from tests.support.cases import BY_NAME, INSIDE, PACKED, Case, named, options
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.running import oracle, run_recurrent
from tests.support.sweeps import crossed

IMPLS = ["torch", "triton"]
SMALL = [
    named("one-token"),
    named("65-tokens", T=20),
    named("rows", T=9),
    named("no-states", T=10),
    Case("packed", T=30, cu_seqlens=(0, 1, 12, 12, 30)),
    named("all-empty-but-one"),
    named("grouped-heads", T=10),
    named("odd-dims", T=10),
    named("strong-decay", T=10),
    named("no-decay", T=10),
    *(named(n, T=10) for n in BY_NAME if n.startswith(("inside", "beta", "exp"))),
    Case("inside-packed", T=30, HV=4, cu_seqlens=(0, 7, 30), options=options(**INSIDE)),
    Case("two-value-tiles", T=5, H=1, HV=1, K=130, V=40, options=options(**INSIDE)),
]


def label(x):
    return x.name if isinstance(x, Case) else "VK" if x else "KV"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
def test_equals_the_recurrence(case, v_first):
    exact = oracle(case)
    for name, value in run_recurrent(case, v_first=v_first).items():
        assert_exact(name, value, exact[name])


@pytest.mark.parametrize("case, v_first", crossed(SMALL, [True, False]), ids=label)
def test_kernel_errs_like_the_torch_stage(case, v_first):
    rounded = {n: t.double() for n, t in case.inputs(dtype=torch.float32).items()}
    exact = oracle(case, rounded)
    plain = run_recurrent(case, torch.float32, v_first=v_first)
    for name, value in run_recurrent(case, torch.float32, "triton", v_first=v_first).items():
        assert_within_budget(name, value, exact[name], plain[name], factor=4.0)


def inputs(case, dtype=torch.float32):
    x = case.inputs(dtype=dtype)
    return [x.pop(n) for n in PACKED], x


@pytest.mark.parametrize("impl, v_first", crossed(IMPLS, [False, True]))
def test_decoding_goes_on_where_a_prefix_ended(impl, v_first):
    """chunk_kda reads a prefix; then tokens follow one by one, in place, in slots of a larger
    cache.
    """
    case = named("inside-grouped", B=3, T=70, states=False)
    (*packed,), rates = inputs(case)
    more = {**rates, **case.keywords, "state_v_first": v_first}
    whole, end = chunk_kda(*packed, **more, output_final_state=True)
    first = [t[:, :66] for t in packed]
    _, state = chunk_kda(*first, **more, output_final_state=True)
    cache = torch.full((5, *state.shape[1:]), 7.0)
    slots = cache[1:4]
    slots.copy_(state)
    for t in range(66, 70):
        token = [x[:, t : t + 1] for x in packed]
        o, final = fused_recurrent_kda(
            *token, **more, initial_state=slots, inplace_final_state=True, impl=impl
        )
        assert final is slots
        assert (o - whole[:, t : t + 1]).abs().max() <= 1e-5 * whole.abs().max()
    assert (slots - end).abs().max() <= 1e-5 * end.abs().max()
    assert (cache[[0, 4]] == 7.0).all()


@pytest.mark.bits
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sequence_without_tokens_passes_its_state_on(impl):
    case = Case("empty", T=5, cu_seqlens=(0, 3, 3, 5))
    packed, rest = inputs(case)
    S = rest["initial_state"]
    kept = S.clone()
    call = {"cu_seqlens": torch.tensor(case.cu_seqlens), "initial_state": S, "impl": impl}
    _, final = fused_recurrent_kda(*packed, **call, output_final_state=True)
    assert torch.equal(final[1], kept[1])
    assert torch.equal(S, kept)  # not in place
    _, same = fused_recurrent_kda(*packed, **call, inplace_final_state=True)
    assert same is S
    assert torch.equal(S, final)


@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_may_be_views(impl):
    """Views of a wider projection, as in a layer, and of a state with other strides."""
    case = Case("views", T=6, B=2, K=16, V=16)
    packed, rest = inputs(case)
    S = rest["initial_state"]
    plain = fused_recurrent_kda(*packed, initial_state=S, output_final_state=True, impl=impl)
    wide = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in packed]
    strided = S.mT.contiguous().mT
    views = fused_recurrent_kda(*wide, initial_state=strided, output_final_state=True, impl=impl)
    for a, b in zip(plain, views, strict=True):
        assert (a - b).abs().max() <= 1e-6 * a.abs().max()


@pytest.mark.bits
def test_offsets_beyond_the_tokens_are_cut_by_the_kernel(monkeypatch):
    """On a device the host does not read them; on the CPU they are checked first."""
    packed, _ = inputs(Case("far", T=6, states=False))
    call = {"output_final_state": True, "impl": "triton"}
    cut = fused_recurrent_kda(*packed, cu_seqlens=torch.tensor([0, 4, 6]), **call)
    far = {"cu_seqlens": torch.tensor([0, 4, 99])}
    with pytest.raises(ValueError, match="cu_seqlens must end at T=6, got 99"):
        fused_recurrent_kda(*packed, **far, **call)
    monkeypatch.setattr("fla_cp.ops.recurrent.check_sequences", lambda *args: None)
    for a, b in zip(cut, fused_recurrent_kda(*packed, **far, **call), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", IMPLS)
def test_states_in_place_have_no_gradients(impl):
    packed, rest = inputs(Case("grad", T=3))
    packed[2].requires_grad_()
    with pytest.raises(ValueError, match="inplace_final_state=True, got v with requires_grad"):
        fused_recurrent_kda(*packed, **rest, inplace_final_state=True, impl=impl)
    with torch.no_grad():
        fused_recurrent_kda(*packed, **rest, inplace_final_state=True, impl=impl)
    with torch.inference_mode():
        state = torch.zeros(1, 2, 8, 6)
        _, final = fused_recurrent_kda(
            *packed, initial_state=state, inplace_final_state=True, impl=impl
        )
    assert final is state
    assert final.any()


def test_gradients_of_some_inputs_or_of_one_output():
    """What needs no gradient gets none, and an output that nobody reads adds nothing."""
    packed, rest = inputs(Case("some", T=5), torch.float64)
    packed[2].requires_grad_()
    keywords = {**rest, "output_final_state": True}
    for i in (0, 1):
        found = fused_recurrent_kda(*packed, **keywords)[i].square().sum()
        wanted = chunk_kda(*packed, **keywords)[i].square().sum()
        (a,), (b,) = (torch.autograd.grad(loss, [packed[2]]) for loss in (found, wanted))
        assert_exact("dv", a, b)
        assert packed[0].grad is None


def test_gradients_of_a_compiled_call():
    packed, _ = inputs(Case("compiled", T=3, states=False))
    packed[2].requires_grad_()
    found, wanted = (
        torch.autograd.grad(f(*packed)[0].square().sum(), [packed[2]])[0]
        for f in (
            torch.compile(fused_recurrent_kda, backend="eager", fullgraph=True),
            fused_recurrent_kda,
        )
    )
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_states_that_cannot_be_overwritten():
    packed, rest = inputs(Case("places", T=3, B=2))
    S = rest["initial_state"]
    with pytest.raises(ValueError, match="inplace_final_state needs initial_state, got None"):
        fused_recurrent_kda(*packed, inplace_final_state=True)
    for bad in (S[:1].expand_as(S), S.mT.contiguous().mT):
        with pytest.raises(ValueError, match="dense in its last two dims and without overlap"):
            fused_recurrent_kda(*packed, initial_state=bad, inplace_final_state=True)


def test_needs_the_interpreter_or_a_gpu(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET")
    packed, _ = inputs(Case("cpu", T=3, states=False))
    with pytest.raises(ValueError, match="impl='triton' runs on CUDA devices, got cpu"):
        fused_recurrent_kda(*packed, impl="triton")
