"""Checks whether each argument is of the right kind: a tensor, a number, a flag. ops/checks.py then
checks how tensors fit each other.

Each failure is a ValueError that names the argument, the rule and what was given. Nothing is
launched, and no value of a tensor is read, except that of a scale without dims. The checks run at
every call, and take about two microseconds of host time in a call that passes them.
"""

from math import inf
from numbers import Integral, Real

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN_TENSORS = (Tensor, Parameter)
"""Types of tensors that need no closer look."""

_DENSE = torch.strided


def described(value: object) -> str:
    """How an error shows what was given: a short value itself, otherwise its type."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return type(value).__name__


def check_tensors(names: tuple[str, ...], values: tuple[object, ...], required: int) -> None:
    """Checks that each value is a dense tensor, of any dtype. Those after the first `required` may
    be None."""
    for x in values:
        if x is None:
            continue
        if type(x) not in PLAIN_TENSORS or x.layout is not _DENSE or x.is_nested:  # type: ignore[attr-defined]
            _check_each(names, values)
            break
    for x in values[:required]:
        if x is None:
            missing = next(n for n, x in zip(names, values, strict=True) if x is None)
            raise ValueError(f"{missing} must be a tensor, got None")


def _check_each(names: tuple[str, ...], values: tuple[object, ...]) -> None:
    for name, x in zip(names, values, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {described(x)}")
        check_dense(name, x)
        if hasattr(x, "to_local"):
            raise ValueError(
                f"{name} must be a tensor of this rank, got {type(x).__name__}: pass "
                f"{name}.to_local()"
            )


def check_dense(name: str, x: Tensor) -> None:
    """Checks that a tensor is neither nested nor sparse."""
    if x.is_nested or x.layout is not _DENSE:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise ValueError(f"{name} must be a dense tensor, got {kind}")


def check_flags(names: tuple[str, ...], values: tuple[object, ...]) -> None:
    """Checks that each value is True or False, not something that converts to a bool, like "no"."""
    for value in values:
        if value is not True and value is not False:
            bad = next(n for n, v in zip(names, values, strict=True) if v is value)
            raise ValueError(f"{bad} must be True or False, got {described(value)}")


def check_count(name: str, value: object, most: int | None = None) -> int:
    """The value as an int, after a check that it is an integer of at least 1, and of at most
    `most` if that is given."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        count = int(value)
        if count >= 1 and (most is None or count <= most):
            return count
    to = "" if most is None else f" to {most}"
    raise ValueError(f"{name} must be an integer from 1{to}, got {described(value)}")


def check_scale(scale: object) -> float | None:
    """The factor on o as a float, or None, after all checks of it.

    A tensor without dims is read, which waits for its device. One that requires a gradient is
    refused, because it would get none.
    """
    if scale is None or (type(scale) is float and -inf < scale < inf):
        return scale
    if isinstance(scale, Tensor):
        if torch.compiler.is_compiling():
            raise ValueError(
                "scale must be a float under torch.compile, where a tensor cannot be read, got "
                f"{described(scale)}"
            )
        check_tensors(("scale",), (scale,), 1)
        if scale.ndim or scale.requires_grad or scale.is_complex() or scale.dtype is torch.bool:
            raise ValueError(
                "scale must be a float, or a real tensor without dims that requires no gradient, "
                f"got shape {tuple(scale.shape)}, {scale.dtype}, "
                f"requires_grad={scale.requires_grad}"
            )
        if scale.device.type == "meta":
            raise ValueError("scale must have a value, got a tensor on the meta device")
        scale = scale.item()
    return _finite("scale", scale)


def check_lower_bound(lower_bound: object, name: str = "lower_bound") -> float | None:
    """The smallest log decay of a step as a float, or None, after all checks of it."""
    if lower_bound is None or (type(lower_bound) is float and -inf < lower_bound < 0):
        return lower_bound
    bound = _finite(name, lower_bound)
    if not bound < 0:
        raise ValueError(f"{name} must be below 0, got {lower_bound}")
    return bound


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a float, got {described(value)}")
    number = float(value)
    if not -inf < number < inf:
        raise ValueError(f"{name} must be finite, got {value}")
    return number


def check_number(name: str, value: object, low: float, *, or_equal: bool = False) -> None:
    """Checks that the value is a finite number above `low`, or with or_equal of at least `low`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        if low < number < inf or (or_equal and number == low):
            return
    rule = f"from {low:g}" if or_equal else f"above {low:g}"
    raise ValueError(f"{name} must be a finite number {rule}, got {described(value)}")


def check_state_layout(transpose_state_layout: object, state_v_first: object) -> bool:
    """Whether states are [V, K]. The option has two names; the caller gives at most one."""
    if transpose_state_layout is None and state_v_first is None:
        return False
    if transpose_state_layout is not None and state_v_first is not None:
        raise ValueError(
            "transpose_state_layout and state_v_first are two names of one option: give one, got "
            f"{described(transpose_state_layout)} and {described(state_v_first)}"
        )
    name, value = "state_v_first", state_v_first
    if state_v_first is None:
        name, value = "transpose_state_layout", transpose_state_layout
    check_flags((name,), (value,))
    return value is True


def check_choice(
    name: str, value: object, choices: tuple[str, ...], *, or_none: bool = False
) -> None:
    """Checks that the value is one of some names. It must be a string, because comparing a tensor
    or an array with a name does not give a bool."""
    if not isinstance(value, str) or value not in choices:
        listed = ["None"] if or_none else []
        listed += map(repr, choices)
        rule = f"{', '.join(listed[:-1])} or {listed[-1]}"
        raise ValueError(f"{name} must be {rule}, got {described(value)}")
