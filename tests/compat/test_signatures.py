"""The signatures of fla_cp.compat are those of FLA 0.6.0, which fla-0.6.0.json records."""

import ast
import inspect

import pytest

from fla_cp import compat
from tests.support.fla_record import RECORD, find

PARAMETERS = inspect.Parameter
BEYOND_FLA = {"cp_context"}
"""Keywords that functions of ours have and FLA's lack."""


def signature(name):
    """Names and defaults in order, keywords that only ours have, and whether there are others."""
    found = list(inspect.signature(find(name)).parameters.values())
    ordered = [p for p in found if p.kind is PARAMETERS.POSITIONAL_OR_KEYWORD and p.name != "self"]
    more = {p.name for p in found if p.kind is PARAMETERS.KEYWORD_ONLY}
    return ordered, more, any(p.kind is PARAMETERS.VAR_KEYWORD for p in found)


def test_every_name_is_in_the_record():
    names = {name.split(".")[0] for name in RECORD}
    assert set(compat.__all__) - {"FLACPContext"} == names
    assert compat.__all__ == sorted(compat.__all__)


@pytest.mark.parametrize("name", RECORD)
def test_names_order_and_defaults_are_those_of_fla(name):
    ordered, more, open_ended = signature(name)
    expected = [
        (arg, ast.literal_eval(default[0]) if default else PARAMETERS.empty)
        for arg, *default in without_defaults_of_torch(RECORD[name]["arguments"])
    ]
    actual = [(p.name, p.default) for p in ordered]
    if name.endswith("_gate"):  # their last argument is a dtype, which the record has as text
        assert str(actual.pop()[1]) == "torch.float32"
    assert actual == expected
    assert open_ended == RECORD[name]["more"]
    assert more <= BEYOND_FLA


def without_defaults_of_torch(arguments):
    return [a for a in arguments if not (len(a) > 1 and a[1].startswith("torch."))]


@pytest.mark.parametrize("name", [n for n in RECORD if n.startswith(("chunk", "fused_recurrent"))])
def test_every_operator_in_chunks_takes_a_context(name):
    ordered, more, _ = signature(name)
    names = {p.name for p in ordered} | more
    assert ("cp_context" in names) == name.startswith("chunk")
