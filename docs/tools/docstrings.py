"""Turns the package's docstrings into Markdown that keeps their lines apart.

An extension of griffe, which reads docstrings for mkdocstrings. A docstring of this package has one
line or several for each argument, `name: what it is`, and indented formulas.
"""

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+(=[^\s:]+)?(, \w+(=[^\s:]+)?)*: |(Returns|Raises)\b|Source: )")
"""How a line begins that must not run on from the line before."""


def markdown(docstring: str) -> str:
    """The docstring with a line break before each entry, and with nothing that Markdown reads as
    markup outside of code."""
    lines: list[str] = []
    for line in docstring.splitlines():
        before = lines[-1] if lines else ""
        formula = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        if formula:
            lines.append(line)
            continue
        words = line.strip()
        if before.strip() and ENTRY.match(words):
            lines[-1] += "  "
        parts = words.split("`")
        parts[::2] = [part.replace("*", r"\*").replace("<", "&lt;") for part in parts[::2]]
        lines.append("`".join(parts))
    return "\n".join(lines)


OPTIONS = "fla_cp.train.config."
"""What lies here is shown as options of the trainer, and a property is none."""


class Entries(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.path.startswith(OPTIONS) and "property" in obj.labels:
            obj.docstring = None  # it is not shown then
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
