"""The signatures of FLA 0.6.0, as tests/compat/fla-0.6.0.json records them, and calls by position.

The record has for each function its module, its arguments in order, each with its default as
source text, and whether it takes other keywords.
"""

import ast
import functools
import json
from pathlib import Path

from fla_cp import compat

RECORD = json.loads(
    (Path(__file__).resolve().parents[1] / "compat" / "fla-0.6.0.json").read_text()
)["functions"]


def find(name):
    """The function or method of fla_cp.compat; a class stands for its constructor."""
    found = functools.reduce(getattr, name.split("."), compat)
    return found.__init__ if isinstance(found, type) else found


def by_position(name, **values):
    """Calls a function as FLA's documentation orders its arguments: those of the record by
    position, with FLA's defaults, and the others by keyword."""
    ordered = []
    for arg, *default in RECORD[name]["arguments"]:
        if arg in values:
            ordered.append(values.pop(arg))
        else:
            ordered.append(ast.literal_eval(default[0]))
    return find(name)(*ordered, **values)
