"""The command `fla-cp-train`: it can be installed without the extra that it needs."""

import subprocess
import sys
import tomllib

import pytest

from fla_cp.train.cli import NEEDED
from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.started import for_torchrun
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

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


def started(path, *flags, **variables):
    """Runs a Python file as a program of that path."""
    command = [*warm_python(), str(path), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True
    )


@pytest.fixture
def installed(tmp_path):
    """The command as pip writes it."""
    path = tmp_path / "bin" / "fla-cp-train"
    path.parent.mkdir()
    path.write_text("import sys\nfrom fla_cp.train.cli import run\nsys.exit(run())\n")
    return path


def test_usage_and_errors_name_the_program_that_was_started(installed):
    for path, name in (
        (installed, "fla-cp-train"),
        (ROOT / "launch" / "train.py", "launch/train.py"),
        (ROOT / "fla_cp" / "train" / "main.py", "python -m fla_cp.train.main"),
    ):
        result = started(path, "--zzz")
        assert result.returncode == MISTAKE, result.stderr
        said = result.stderr
        assert said == f"error: unknown option --zzz; {name} --help lists all\n"
        for other in {"fla-cp-train", "launch/train.py", "fla_cp.train.main"} - {name.split()[-1]}:
            assert other not in said


def test_the_command_for_more_ranks_starts_the_same_program(installed, monkeypatch):
    result = started(installed, "--cp", "4", WORLD_SIZE="2")
    assert result.returncode == MISTAKE
    assert "torchrun --nproc-per-node 4 --no-python fla-cp-train --cp 4" in result.stderr
    result = started(ROOT / "launch" / "train.py", "--cp", "4", WORLD_SIZE="2")
    assert "torchrun --nproc-per-node 4 launch/train.py --cp 4" in result.stderr
    monkeypatch.setattr(sys, "argv", [str(ROOT / "fla_cp" / "train" / "main.py")])
    assert for_torchrun("fla-cp-train") == "-m fla_cp.train.main"
    monkeypatch.setattr(sys, "argv", ["anywhere/fla-cp-evaluate"])
    assert for_torchrun("fla-cp-evaluate") == "--no-python fla-cp-evaluate"
