"""Commands and programs in the pages of docs/: where they stand, and how they are tried.

Commands run, except those for which `why_dry` has a reason. These are run dry, up to the point
where a program has read its arguments. A line `<!-- run WORDS -->` before a block of bash makes its
commands short enough for a CPU. Its words are added to the programs that train, and those after a
semicolon to the programs that read a trained model. A block of Python runs on as many ranks as
`<!-- run ranks=N -->` says.
"""

import argparse
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tests.support.fresh import call, fresh_environment, install
from tests.support.manifests import documents
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

FENCE = re.compile(r"^(?:<!-- run ([^>]*?) ?-->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
SECTION = re.compile(r"^## (.*)$", re.M)

TRAINERS = {
    *("fla-cp-train", "launch/train.py", "fla-cp-memory", "benchmarks.train"),
    *(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")),
}
READERS = {"fla-cp-evaluate", "launch/evaluate.py", "fla-cp-generate", "launch/generate.py"}
PROGRAMS = ("make", "pip", "python", "torchrun", "accelerate", "sbatch", "kubectl", "fla-cp-[a-z]+")
COMMAND = re.compile(rf"([A-Z_]+=\S+ )*({'|'.join(PROGRAMS)}) ")

DRY = {
    "sbatch ": "it needs Slurm: the script runs with stand-ins for scontrol and srun",
    "--nnodes 2 ": "it needs two hosts; tests/train/test_two_hosts.py makes some",
    "kubectl ": "it needs a Kubernetes cluster",
    "--offload": "only GPUs can offload activations",
    "--peer fla": "it needs a GPU and flash-linear-attention",
    "make test": "it would run these tests again",
    "make format": "it rewrites the files of the clone",
}
"""What is in a command that is run dry, and why."""

PACKAGES = {"wandb": "no extra has the package wandb; tests/train/test_trackers.py has a stand-in"}
"""The same for commands that are run where a package is installed."""


def why_dry(words: list[str]) -> str | None:
    """Why a command is not run, or None if it is."""
    command = f"{shlex.join(words)} "
    missing = {name: why for name, why in PACKAGES.items() if find_spec(name) is None}
    return next((why for text, why in (DRY | missing).items() if text in command), None)


class Block(NamedTuple):
    """A fenced block. section: the last heading of the second level above it, or "". words: those
    after `run`."""

    page: str
    section: str
    line: int
    language: str
    code: str
    words: list[str]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = []
    for match in FENCE.finditer(text):
        words, language, code = match.groups()
        section = ["", *SECTION.findall(text, 0, match.start())][-1]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(path.name, section, line, language, code, (words or "").split()))
    return found


def commands(code: str) -> list[list[str]]:
    """The words of each command, without comments."""
    joined = code.replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in joined.splitlines())
    return [words for words in lines if words]


def inline_commands(path: Path) -> list[str]:
    """The commands in the text of a page, between backticks, that have more than a program's
    name."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    spans = (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text))
    return [span for span in spans if COMMAND.match(span)]


def shortened(command: list[str], words: list[str]) -> list[str]:
    """The command with the words after `run`. Example: [--max-steps, 2, ;, --needle-count, 1] adds
    the first two to fla-cp-train and the last two to fla-cp-evaluate."""
    at = words.index(";") if ";" in words else len(words)
    if command[:2] == ["make", "train"]:
        given = [word.removeprefix("ARGS=") for word in command[2:]]
        return [*command[:2], " ".join(["ARGS=", *given, shlex.join(words[:at])])]
    for programs, mine in ((TRAINERS, words[:at]), (READERS, words[at + 1 :])):
        if programs & {*command}:
            return [*command, *mine]
    return command


class Parsed(Exception):
    """A program has read its arguments."""


@contextmanager
def reading_only(*words: str):
    """In the block, a program gets these arguments and ends with `Parsed` once it has read them."""
    with ExitStack() as patched:
        for name in ("parse_args", "parse_intermixed_args"):
            real = getattr(argparse.ArgumentParser, name)

            def parse(self, args=None, namespace=None, real=real):
                real(self, args, namespace)
                raise Parsed

            patched.enter_context(patch.object(argparse.ArgumentParser, name, parse))
        patched.enter_context(patch.object(sys, "argv", list(words)))
        yield


def _read_by(main, *words: str) -> None:
    """Raises AssertionError if the program does not read its arguments, and whatever it raises or
    exits with if it refuses them."""
    with reading_only(*words):
        try:
            main()
        except Parsed:
            return
    raise AssertionError(f"{words[0]} reads no arguments")


def _trainer(words: list[str], started: int) -> None:
    from fla_cp.train.parse import parse

    with patch.dict(os.environ, {"WORLD_SIZE": str(started)}):
        config = parse(words)
    needed = config.parallel.world_size
    assert started in (1, needed), f"{started} ranks are started, {needed} are needed: {words}"


def _script(words: list[str], started: int) -> None:
    """A script of the repository, with its arguments; script.py is the reader's own."""
    if words[0] == "script.py":
        return
    path = ROOT / words[0]
    assert path.is_file(), words[0]
    if path == ROOT / "launch/train.py":
        _trainer(words[1:], started)
    else:
        _read_by(lambda: runpy.run_path(str(path), run_name="__main__"), *words)


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    ranks = int(args.nproc_per_node) * int(args.nnodes.split(":")[-1])
    rest = [args.training_script, *args.training_script_args]
    if args.module and rest[0] == "fla_cp.train.main":
        _trainer(rest[1:], ranks)
    elif args.module:
        _module(rest)
    else:
        _script(rest, ranks)


def _module(words: list[str]) -> None:
    if words[0] == "fla_cp.train.torchrun":
        _torchrun(words[1:])
        return
    path = ROOT / words[0].replace(".", "/")
    name = f"{words[0]}.__main__" if path.is_dir() else words[0]
    assert (ROOT / (name.replace(".", "/") + ".py")).is_file(), words[0]
    _read_by(importlib.import_module(name).main, *words)


def _python(words: list[str]) -> None:
    if words[0] == "-m":
        _module(words[1:])
    else:
        _script(words, 1)


def _make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    found = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(targets) <= set(found), words
    for word in words:
        if word.startswith("ARGS="):
            _trainer(["--cp", "4", *shlex.split(word.removeprefix("ARGS="))], 1)


def _pip(words: list[str]) -> None:
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), words


def _export(words: list[str]) -> None:
    from fla_cp.train.export import main

    _read_by(main, "fla-cp-export", *words)


def _tokenize(words: list[str]) -> None:
    from fla_cp.train.pretokenize import run

    _read_by(run, "fla-cp-tokenize", *words)


def _accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    _script([args.training_script, *args.training_script_args], args.num_processes)


HOSTS = """#!/usr/bin/env bash
echo first-host
"""
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$FOUND"
"""


def _sbatch(words: list[str], folder: Path) -> None:
    """The script runs as it would in a job, except that srun notes what it should start."""
    at = next(n for n, word in enumerate(words) if word.endswith(".sh"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--gpus-per-node", required=True)
    given = parser.parse_args(words[:at])
    for name, text in (("scontrol", HOSTS), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_GPUS_ON_NODE": given.gpus_per_node,
        "SLURM_JOB_NODELIST": "hosts",
        "SLURM_JOB_NUM_NODES": given.nodes,
        "SLURM_JOB_ID": "7",
        "FOUND": str(folder / "found"),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    script = ["bash", str(ROOT / words[at]), *words[at + 1 :]]
    done = subprocess.run(script, env=environment(**job), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    started = (folder / "found").read_text().split("\n")[:-1]
    _module(started[started.index("-m") + 1 :])


def _kubectl(words: list[str]) -> None:
    """A manifest is checked, and what it starts reads its arguments in the variables of Kubeflow
    Trainer; other commands are parsed only."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    apply = commands.add_parser("apply", allow_abbrev=False)
    apply.add_argument("-f", dest="file", required=True)
    for name in ("get", "describe", "delete"):
        commands.add_parser(name, allow_abbrev=False).add_argument("trainjob", nargs=2)
    logs = commands.add_parser("logs", allow_abbrev=False)
    logs.add_argument("-f", dest="follow", action="store_true")
    logs.add_argument("job")
    args = parser.parse_args(words)
    if args.command != "apply":
        kind = args.job.split("/")[0] if args.command == "logs" else args.trainjob[0]
        assert kind == ("job" if args.command == "logs" else "trainjob"), words
        return
    path = ROOT / args.file
    assert path.is_file(), args.file
    jobs = [found["spec"]["trainer"] for found in documents(path) if found["kind"] == "TrainJob"]
    for job in jobs:
        given = {
            "PET_NNODES": str(job["numNodes"]),
            "PET_NPROC_PER_NODE": str(job["numProcPerNode"]),
        }
        with patch.dict(os.environ, given):
            run_dry([*job["command"], *job["args"]], ROOT)


def _program(name: str, words: list[str]) -> None:
    """`fla-cp-NAME`, whose program is the module of that name."""
    main = importlib.import_module(f"fla_cp.train.{name}").main
    _read_by(main, f"fla-cp-{name}", *words)


def _memory(words: list[str]) -> None:
    from fla_cp.train import memory

    with patch.object(memory, "Predictor", side_effect=Parsed):
        _read_by(lambda: memory.main(words), "fla-cp-memory")


def run_dry(words: list[str], folder: Path) -> None:
    """Does with a command what it does until it has read its arguments. folder: for files that
    stand in for other programs. Raises if a program refuses its arguments or is not known here."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program == "sbatch":
        _sbatch(rest, folder)
        return
    known = {
        "make": _make,
        "pip": _pip,
        "python": _python,
        "torchrun": _torchrun,
        "accelerate": _accelerate,
        "kubectl": _kubectl,
        "fla-cp-train": lambda rest: _trainer(rest, 1),
        "fla-cp-evaluate": partial(_program, "evaluate"),
        "fla-cp-export": _export,
        "fla-cp-generate": partial(_program, "generate"),
        "fla-cp-memory": _memory,
        "fla-cp-plot": partial(_program, "plot"),
        "fla-cp-tokenize": _tokenize,
    }
    assert program in known, f"nothing is known about {program}"
    known[program](rest)


ENTRY = {
    "fla-cp-train": "from fla_cp.train.cli import run; import sys; sys.exit(run())",
    "fla-cp-evaluate": "from fla_cp.train.cli import run_evaluate as r; import sys; sys.exit(r())",
    "fla-cp-export": "from fla_cp.train.cli import run_export; import sys; sys.exit(run_export())",
    "fla-cp-generate": "from fla_cp.train.cli import run_generate as r; import sys; sys.exit(r())",
    "fla-cp-memory": "from fla_cp.train.cli import run_memory; import sys; sys.exit(run_memory())",
    "fla-cp-plot": "from fla_cp.train.cli import run_plot; import sys; sys.exit(run_plot())",
    "fla-cp-tokenize": "from fla_cp.train.pretokenize import run; import sys; sys.exit(run())",
}
"""What the package's programs are, so that this clone's run whichever is installed."""


CLONE = (
    *("Makefile", "pyproject.toml", "constraints.txt", "MANIFEST.in", "README.md", "LICENSE"),
    *("fla_cp", "launch", "examples", "benchmarks"),
)
"""What commands find in a clone."""


def as_clone(folder: Path) -> None:
    """Gives a folder what commands find in a clone, and an environment that `make` need not build:
    its torchrun is that of `run`."""
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec {shlex.join(_torchrun_words())} "$@"\n')
    (programs / "torchrun").chmod(0o755)
    (folder / ".venv/.installed").touch()


def _torchrun_words() -> list[str]:
    return [*warm_python(), "-m", "torch.distributed.run", "--standalone"]


def _installed(words: list[str], folder: Path) -> str:
    """What a program says that `pip install` has put into a new environment. No index is asked: the
    packages of this environment must be all that is needed."""
    programs = fresh_environment(folder)
    install(programs, words[2:], folder)
    assert {p.name for p in programs.iterdir()} >= ENTRY.keys()
    return call(programs / "fla-cp-train", "--help", folder=folder)


def run(words: list[str], folder: Path, timeout: float = 1500) -> str:
    """Runs a command in a folder, and returns what it prints. Raises AssertionError if it fails."""
    if words[:2] == ["pip", "install"]:
        return _installed(words, folder)
    variables = {"XDG_CACHE_HOME": str(folder / "cache"), "WANDB_MODE": "offline"}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words[0].partition("=")
        words = words[1:]
    command = [*words]
    if command[0] in ENTRY:
        command[:1] = [*warm_python(), "-c", ENTRY[command[0]]]
    elif command[0] == "python":
        command[:1] = warm_python()
    elif command[0] == "accelerate":
        module = "accelerate.commands.accelerate_cli"
        command[:2] = [*warm_python(), "-m", module, "launch", "--main_process_port", "0"]
    elif command[0] == "torchrun":
        command[:1] = _torchrun_words()
    own = environment(**variables)
    done = subprocess.run(
        command,
        cwd=folder,
        env={name: value for name, value in own.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout
