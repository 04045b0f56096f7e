"""`make test` runs everything: tests that skip without a package find it there."""

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def extras():
    """The extras that the Makefile installs."""
    (line,) = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return line.split(",")


def test_make_test_has_every_package():
    if "MAKELEVEL" not in os.environ:
        pytest.skip("only `make test` promises the packages of all extras")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras()) == set(declared["optional-dependencies"])
    for extra in extras():
        for need in declared["optional-dependencies"][extra]:
            version(re.match(r"[\w.-]+", need)[0])  # PackageNotFoundError, if it is missing
