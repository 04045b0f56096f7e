"""The version, the changelog and the release note agree: tools/release.py."""

import re
import runpy
import subprocess
import sys
import tomllib

import pytest

import fla_cp
from tests.support.processes import ROOT

RELEASE = runpy.run_path(str(ROOT / "tools/release.py"))
problems, note = RELEASE["problems"], RELEASE["note"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

GOOD = """# Changelog

Newest first.

## Unreleased

Nothing yet.

## 0.2.0 - 2026-12-01

### Added: a thing

- Something ([how](docs/training.md#data)), after [a standard](https://standard.org).

## 0.1.0 - 2026-11-24

The first version.
"""


def test_one_place_has_the_version():
    assert RELEASE["version"]() == fla_cp.__version__
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in configured["project"]
    assert configured["project"]["dynamic"] == ["version"]
    assert configured["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fla_cp.__version__"}


def test_the_changelog_has_this_version():
    assert problems(fla_cp.__version__, CHANGELOG) == []
    assert problems("0.2.0", GOOD) == []
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/release.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"version {fla_cp.__version__} is the newest of CHANGELOG.md\n"


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("## Unreleased\n", "", "must begin with the section Unreleased"),
        ("0.2.0 -", "0.3.0 -", "must be that of fla_cp.__version__, 0.2.0, got 0.3.0"),
        ("0.2.0 - 2026-12-01", "0.2.0", "must be named VERSION - YYYY-MM-DD, got '0.2.0'"),
        ("2026-12-01", "2026-12-32", "must be named VERSION - YYYY-MM-DD"),
        ("0.1.0 -", "0.10.0 -", "newest first, got '0.10.0 - 2026-11-24' too late"),
        ("2026-12-01", "2026-11-01", "newest first, got '0.1.0 - 2026-11-24' too late"),
        ("The first version.\n", "", "'0.1.0 - 2026-11-24' must not be empty"),
        (GOOD.partition("## 0.2.0")[2], "", "must be named"),
    ],
)
def test_what_keeps_a_version_from_being_released(old, new, problem):
    assert GOOD.count(old) == 1
    found = problems("0.2.0", GOOD.replace(old, new))
    assert problem in "\n".join(found)


def test_entries_without_a_version_are_counted():
    entry = "- Something\n  else ([how](a.md)).\n"
    assert RELEASE["left_out"](GOOD) == 0
    assert RELEASE["left_out"](GOOD.replace("Nothing yet.\n", f"### Fixed\n\n{entry}{entry}")) == 2


def test_an_unreleased_version_needs_its_section():
    (problem,) = problems("0.3.0", GOOD)
    assert problem.endswith("fla_cp.__version__, 0.3.0, got 0.2.0")
    assert problems("0.1.0", "## Unreleased\n\nAll.\n")[0].endswith("0.1.0, got none")


def test_the_note_is_the_section_as_a_page_of_its_own():
    assert note("0.2.0", GOOD) == (
        "# fla_cp 0.2.0 - 2026-12-01\n"
        "\n"
        "## Added: a thing\n"
        "\n"
        "- Something (how (docs/training.md#data)), after [a standard](https://standard.org).\n"
    )
    with pytest.raises(ValueError, match=r"must have a section in the changelog, got 0\.3\.0"):
        note("0.3.0", GOOD)


def test_the_note_of_this_version_has_every_line_of_its_section():
    shown = note(fla_cp.__version__, CHANGELOG)
    lines = CHANGELOG.partition(f"## {fla_cp.__version__} - ")[2].partition("\n## ")[0].splitlines()
    assert len(shown.splitlines()) == len("\n".join(lines).strip().splitlines())
    assert not re.search(r"^###|\]\((?!https?:)", shown, re.M)
