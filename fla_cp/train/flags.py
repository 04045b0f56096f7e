"""Finds the first mistake in a command line, and says it in one line.

tyro prints its errors as boxes of many lines. `check_flags` therefore looks first: each option of
the configuration is a number, a text, a choice or a flag without a value.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.started import program

_KINDS: dict[type, str] = {int: "a whole number", float: "a number"}
_NEAR = 0.7
"""Least similarity of an option that is suggested for an unknown one."""


def check_flags(argv: Sequence[str], others: Iterable[str] = ()) -> None:
    """Raises UserError for the first option that is not known, lacks its value or has a wrong one.

    argv: options that may stand without a value have one already, see `parse`. others: further
    options of the program, which are suggested as well.
    """
    words, before = iter(argv), ""
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag.replace("_", "-")
        if not word.startswith("-") or not name.strip("-"):
            extra = f" after {before}, which takes no value" if before in _switches() else ""
            raise UserError(f"options must begin with --, got {word!r}{extra}")
        if name in _switches():
            if has_value:
                raise UserError(f"{flag} must be given without a value, got {value!r}")
        elif name not in _options():
            raise UserError(f"unknown option {flag}{_advice(name, others)}")
        else:
            kind = _options()[name]
            given = value if has_value else next(words, None)
            if given is None or (given.startswith("--") and not has_value):
                raise UserError(f"{flag} must have a value{_rule(kind, ': ')}")
            if not _fits(kind, given):
                raise UserError(f"{flag} must be{_rule(kind, ' ')}, got {given!r}")
        before = name


def _advice(name: str, others: Iterable[str]) -> str:
    """The options that are nearest to an unknown one, at most three, each by its shortest name."""
    known = {flag: min(names, key=len) for names, _ in _fields() for flag in names}
    scores: dict[str, float] = {}
    for flag, shortest in {**known, **{flag: flag for flag in others}}.items():
        last = f"--{flag.rpartition('.')[2].lstrip('-')}"
        score = max(difflib.SequenceMatcher(None, name, one).ratio() for one in (flag, last))
        if flag.endswith(name[1:]) or (len(name) > 3 and flag.startswith(name)):
            score = 1.0  # --steps for --max-steps, --tok for --tokenizer
        scores[shortest] = max(score, scores.get(shortest, 0.0))
    best = max(scores.values())
    near = sorted((flag for flag in scores if scores[flag] > best - 0.05), key=len)[:3]
    if best < _NEAR:
        return f"; {program('fla-cp-train')} --help lists all"
    return f"; did you mean {' or '.join(near)}?"


def _rule(kind: Any, before: str) -> str:
    """The rule for a value, for a message; "" if any text will do. before: put before the rule."""
    choices, base = _parts(kind)
    if choices:
        return f"{before}one of {', '.join(choices)}"
    return before + _KINDS[base] if base in _KINDS else ""


def _parts(kind: Any) -> tuple[tuple[str, ...], Any]:
    """The choices of a type (none if it has none), and the type without None."""
    union = get_origin(kind) in (Union, types.UnionType)
    (base,) = (one for one in (get_args(kind) if union else (kind,)) if one is not type(None))
    if get_origin(base) is Literal:
        return tuple(map(str, get_args(base))), base
    return (("True", "False") if base is bool else ()), base


def _fits(kind: Any, value: str) -> bool:
    choices, base = _parts(kind)
    if value == "None" and base is not kind:
        return True
    if choices:
        return value in choices
    try:
        base(value)
    except ValueError:
        return False
    return True


@cache
def _options() -> dict[str, Any]:
    """The type of each option that takes a value, by all of its names."""
    return {name: kind for names, kind in _fields() for name in names if kind is not bool}


@cache
def _switches() -> frozenset[str]:
    """The options that take no value, with those that turn them off."""
    names = {name for names, kind in _fields() for name in names if kind is bool}
    off = {f"{name[: (at := max(2, name.rfind('.') + 1))]}no-{name[at:]}" for name in names}
    return frozenset(names | off | {"--help", "-h"})


def _fields() -> Iterator[tuple[tuple[str, ...], Any]]:
    """All names of each option, with its type."""
    yield ("--config",), str
    for section in dataclasses.fields(TrainConfig):
        if section.name == "config":
            continue
        kind = get_type_hints(TrainConfig)[section.name]
        for name, hint in get_type_hints(kind, include_extras=True).items():
            annotated = get_origin(hint) is Annotated
            aliases = hint.__metadata__[0].aliases if annotated else ()
            full = f"--{section.name}.{name}".replace("_", "-")
            yield (full, *aliases), get_args(hint)[0] if annotated else hint
