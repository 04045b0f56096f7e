"""The inverse of a chunk's triangular matrix where products drop bits, as tensor cores do.

Triton's interpreter multiplies whole fp32 numbers. Here its products of fp32 take the eleven bits
of TF32 and drop the others.
"""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import inverse
from fla_cp.kernels.triton.device.inverse import needs_nearest, unit_lower_inverse
from fla_cp.kernels.triton.intra import intra
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.closeness import share_of_budget
from tests.support.members import BY_NAME, Call, collect, draw, operator
from tests.support.ptx_emulator import as_tf32
from tests.support.rounded import Rounding, rounded_dplr
from tests.support.triangles import drawn, inverses_by_warps, of_parallel_keys

DPLR = BY_NAME["dplr_delta_rule"]
HALF = torch.float16


@InterpretedFunction
def shortened(x):
    bits = tl.cast(x.to(tl.float32), tl.int32, bitcast=True)
    return tl.cast(bits & -0x2000, tl.float32, bitcast=True)


@InterpretedFunction
def dropping_dot(a, b, PRECISION: tl.constexpr, acc=None):
    return tl.dot(shortened(a), shortened(b), acc=acc, input_precision="ieee")


@InterpretedFunction
def inverse_kernel(A, T, NEAREST: tl.constexpr):
    i = tl.arange(0, 64)
    at = tl.program_id(0) * 64 * 64 + i[:, None] * 64 + i[None, :]
    b_A = tl.load(A + at)
    same = (i // 16)[:, None] == (i // 16)[None, :]
    b_16 = tl.sum(tl.reshape(tl.where(same, b_A, 0.0), [4, 16, 4, 16]), axis=2)
    tl.store(T + at, unit_lower_inverse(b_A, b_16, 64, NEAREST, "tf32"))


@pytest.fixture(autouse=True)
def as_tensor_cores(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(inverse, "dot", dropping_dot)


def inverted(A, near):
    """(I + A)^-1 [.., 64, 64] by the kernels' code."""
    A = A.float().contiguous()
    T = torch.empty_like(A)
    inverse_kernel[(A.numel() // 64**2,)](A, T, near)
    return T.double()


def inverted_by_warps(A, terms):
    """(I + A)^-1 [.., 64, 64] by the code of the Gluon kernels."""
    # above the diagonal, kernels leave anything
    x = torch.where(torch.ones(64, 64).tril(-1) > 0, -A.float(), float("nan"))

    def product(a, b, acc, input_precision):
        return acc + cut(a) @ cut(b)

    return inverses_by_warps(x, terms, torch.float32, product).sum(1).double()


def cut(x):
    """The eleven bits of TF32 of each number."""
    return torch.from_numpy(as_tf32(x.contiguous().numpy()))


class OfKernels(Rounding):
    """Also rounds inside the inverse. near: to nearest, else towards zero."""

    def __init__(self, dtype, near):
        super().__init__(dtype)
        self.near = near

    def __call__(self, name, x):
        if name == "T":
            eye = torch.eye(64, dtype=x.dtype)
            A = torch.linalg.solve_triangular(x, eye.expand_as(x), upper=False) - eye
            x = inverted(A.tril(-1), self.near)
        return super().__call__(name, x)


def test_which_inverses_round_to_nearest():
    found = {d: [needs_nearest(n, d) for n in (1, 2)] for d in (tl.float16, tl.bfloat16)}
    assert found == {tl.float16: [True, True], tl.bfloat16: [False, True]}
    assert not needs_nearest(1, tl.float32)


def test_dropped_bits_err_more_and_in_one_direction():
    A = drawn(20, torch.Generator().manual_seed(0)).double()
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + A)
    off = {near: inverted(A, near) - exact for near in (True, False)}
    below = exact.tril(-1)
    # how much of the exact inverse is missing
    missing = {n: -(e * below).sum() / below.square().sum() for n, e in off.items()}
    assert off[False].norm() > 2.5 * off[True].norm()
    assert missing[False] > 2e-4 and abs(missing[True]) < 2e-5, missing


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("draw_A", [drawn, of_parallel_keys])
def test_inverses_by_warps_err_as_others(terms, draw_A):
    """What stands above the diagonal does not reach the inverse, which is zero there."""
    A = draw_A(20, torch.Generator().manual_seed(0)).double()
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + A)
    found = inverted_by_warps(A, terms)
    assert not found.triu(1).any() and (found.diagonal(dim1=1, dim2=2) == 1).all()
    errors = [(T - exact).norm() for T in (found, inverted(A, terms > 1))]
    assert errors[0] <= 1.2 * errors[1], errors


@pytest.mark.parametrize("per_head", [True, False])
def test_local_stages_round_to_nearest_in_fp16(per_head):
    """T errs by little more than its own rounding to fp16."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    q, k, p = torch.nn.functional.normalize(randn(3, 64, 1, 64), dim=-1).to(HALF)
    v, g = randn(64, 1, 16).to(HALF), torch.zeros(64, 1, *([] if per_head else [64]))
    rule = DeltaRule(scale=1.0, per_head=per_head, removal="p")
    c = intra(rule, Packing.build((0, 64)), Inputs(q, k, v, g, None, None, None, p))
    A = (p[:, 0].double() @ k[:, 0].double().mT).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + A)
    lost = (exact.to(HALF).double() - exact).norm()
    assert (c.T[0, 0].double() - exact).norm() < 3 * lost  # 6.1 with dropped bits


def test_roundings_of_a_state_that_forgets_nothing():
    """Roundings of all chunks are left in such a state, which is more than six. The budget knows
    of it, and a kernel that drops bits of the inverse is over it."""
    x, keywords, weights = draw(DPLR, Call(T=1000, HV=2, K=128, V=64, decay=0.0))
    x = {n: t.to(HALF if n in DPLR.arguments else torch.float32) for n, t in x.items()}
    wide = {n: t.double() for n, t in x.items()}
    op = partial(operator, DPLR, "chunk", **keywords, impl="torch")
    exact, plain = collect(op, wide, weights), collect(op, x, weights)
    right = rounded_dplr(wide, *weights, Rounding(HALF))

    def use(found, *rounded):
        name = "final_state"
        given = exact[name], plain[name], None, HALF
        return share_of_budget(found[name], *given, *(r[name] for r in rounded))

    near, dropped = (rounded_dplr(wide, *weights, OfKernels(HALF, n)) for n in (True, False))
    assert use(near) > 0.95 and use(near, right) < 0.9
    assert use(dropped, right) > 1.2
