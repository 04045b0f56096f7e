"""Tolerances: nine digits in fp64, and in other dtypes an error budget from the data."""

import torch
from torch import Tensor

EXACT = 1e-9
"""Largest error of an fp64 result, relative to the largest exact element."""


def _report(name: str, actual: Tensor, exact: Tensor) -> str:
    error = (actual.double() - exact.double()).abs()
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: max error {error.max():.2e}, rms {error.square().mean().sqrt():.2e}, exact max "
        f"{exact.abs().max():.2e}, worst at {where}: {actual[where]:.6g} for {exact[where]:.6g}"
    )


def assert_exact(name: str, actual: Tensor, exact: Tensor) -> None:
    """Asserts an equal shape, and an error within EXACT of the largest exact element (or 1e-3)."""
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape} for {exact.shape}"
    if actual.numel():
        error = (actual.double() - exact.double()).abs().max()
        assert error <= EXACT * exact.abs().max().clamp(min=1e-3), _report(name, actual, exact)


def assert_within_budget(
    name: str,
    actual: Tensor,
    exact: Tensor,
    baseline: Tensor,
    factor: float = 2.0,
    shift: float = 0.0,
) -> None:
    """Asserts an error of at most `factor` times the baseline's error plus one rounding.

    Errors are relative to fp64. shift: share of the largest exact element that is added to the
    budget.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape} for {exact.shape}"
    exact = exact.double()
    floor = torch.finfo(actual.dtype).eps * exact.abs().max()
    for kind in ("max", "rms"):
        error, budget = (
            _size(kind, actual - exact),
            factor * (_size(kind, baseline.double() - exact) + floor) + shift * exact.abs().max(),
        )
        assert error <= budget, f"{kind} over {budget:.2e}. {_report(name, actual, exact)}"


BUDGET = 1.25
"""A kernel's error may be this multiple of the error from rounding its operands alone, since it may
order and split sums in another way. Measured on an H200: 0.95 to 1.10 for every output and
gradient except those of A_log and dt_bias, which are sums of few numbers."""


def share_of_budget(
    actual: Tensor,
    exact: Tensor,
    baseline: Tensor,
    fold: Tensor | None,
    dtype: torch.dtype,
    rounded: Tensor | None = None,
) -> float:
    """The error as a share of its budget.

    The budget is twice the error of the torch stages plus six roundings to the inputs' dtype, of
    half a unit each: six rounded operands follow one another on the longest way to a gradient (kg,
    T, r, v_new, h or dh, and the gradient of the scores), and the torch stages round none of them.
    In the maximum they may all have one sign; in the rms of many elements of a half-precision dtype
    they are independent. fold: an additional error, for sums over all tokens.

    That holds for a state that forgets, in which only the last chunks' roundings are left. Where
    nothing is forgotten, the roundings of all chunks are in the final state: N chunks that each
    change a share s of it leave s sqrt(N) times the error of one, and where the state grows, early
    errors grow with it. No number of roundings holds for every N, s and growth, but all of them are
    in the data. rounded: the result in fp64 with operands rounded as they must be (rounded.py). The
    error may then be BUDGET times that of `rounded`, if this is more.
    """
    unit = torch.finfo(dtype).eps / 2
    many = dtype.itemsize == 2 and exact.numel() >= 256
    shares = []
    for size, roundings in (
        (lambda e: e.abs().max(), 6),
        (lambda e: e.square().mean().sqrt(), 6**0.5 if many else 6),
    ):
        budget = 2 * size(baseline.double() - exact) + roundings * unit * size(exact)
        if fold is not None:
            budget = budget + size(fold)
        if rounded is not None:
            budget = torch.maximum(budget, BUDGET * size(rounded.double() - exact))
        shares.append((size(actual.double() - exact) / budget.clamp(min=1e-30)).item())
    return max(shares)


def _size(kind: str, error: Tensor) -> Tensor:
    return error.abs().max() if kind == "max" else error.square().mean().sqrt()
