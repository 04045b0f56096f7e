"""The options of a command, and those that a page of the documentation names."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def missing_options(main, capsys, page):
    """The options in `main --help` that docs/`page` does not name in code style, apart from --help
    itself. main: the command's function."""
    with pytest.raises(SystemExit):
        main(["--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options, "the help names no option"
    named = set(re.findall(r"`(--[a-z-]+)`", (DOCS / page).read_text()))
    return options - named
