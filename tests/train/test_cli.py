"""The command `fla-cp-train`: it can be installed without the extra that it needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fla_cp.train.cli import NEEDED
from fla_cp.train.exit_codes import MISTAKE

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from fla_cp.train.cli import run; sys.exit(run())"


def fla_cp_train(*flags, without=()):
    """Runs the entry of the command in a process where the modules `without` are not found."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({without!r})); "
    return subprocess.run(
        [sys.executable, "-c", hidden + COMMAND, *flags], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("without", [NEEDED, ("tyro",)], ids=["all", "one"])
def test_without_its_extra_it_says_which_to_install(without):
    result = fla_cp_train("--help", without=without)
    assert result.returncode == MISTAKE
    message = f"error: fla-cp-train needs {', '.join(without)}: pip install 'fla_cp[train]'\n"
    assert (result.stdout, result.stderr) == ("", message)


def test_with_its_extra_it_shows_its_flags():
    result = fla_cp_train("--help")
    assert result.returncode == 0, result.stderr
    assert "--cp" in result.stdout and "--max-steps" in result.stdout


def test_the_extra_has_what_it_looks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(r.partition(">")[0] for r in project["optional-dependencies"]["train"]) == NEEDED
    assert project["scripts"]["fla-cp-train"] == "fla_cp.train.cli:run"


def test_export_says_which_extras_to_install():
    code = "import sys; sys.modules['safetensors'] = None; "
    code += "from fla_cp.train.cli import run_export; sys.exit(run_export())"
    given = [sys.executable, "-c", code, "--help"]
    result = subprocess.run(given, cwd=ROOT, capture_output=True, text=True)
    message = "error: fla-cp-export needs safetensors: pip install 'fla_cp[train,hf]'\n"
    assert (result.returncode, result.stderr) == (MISTAKE, message)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["fla-cp-export"] == "fla_cp.train.cli:run_export"
