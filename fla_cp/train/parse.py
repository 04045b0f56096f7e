"""A run's configuration from a command line and TOML files, and back to TOML.

Values come from the defaults of `config`, from `--config FILE.toml` and from flags; a later source
wins.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import os
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from fla_cp.train.config import TrainConfig, UserError, with_recipe
from fla_cp.train.ending import silence
from fla_cp.train.flags import check_flags
from fla_cp.train.rules import validate
from fla_cp.train.started import program

BARE = {
    "model.remat": ("full", "none"),
    "model.compile": ("on", "off"),
    "parallel.cuda_graphs": ("on", "off"),
}
"""Options that may stand without a value: what --NAME and --no-NAME then mean, with the name of the
section or without. In TOML they may be true or false."""

_FLAGS = {
    flag: name
    for name in BARE
    for long in [name.replace("_", "-")]
    for flag in (long, long.partition(".")[2])
}
"""The option of each flag, without its dashes."""


_BOX = dict.fromkeys(map(ord, "╭╮╰╯│─"), " ")

GONE = {
    "run.tensorboard": "use --tracker tensorboard, which is the default, or --tracker none "
    "(in a TOML file run.tracker)"
}
"""Options of former versions, and what to do instead."""


def _refuse_gone(argv: Sequence[str]) -> None:
    """Raises UserError for a flag of GONE, with or without "no-" and a value."""
    for word in argv:
        flag = word.split("=")[0]
        name = flag.replace(".no-", ".").replace("-", "_")
        if name.startswith("__") and name[2:] in GONE:
            raise UserError(f"{flag} is no longer an option; {GONE[name[2:]]}")


def _with_values(argv: Sequence[str]) -> list[str]:
    """The arguments with a value for each option of BARE that has none."""
    given = []
    for i, word in enumerate(argv):
        flag = word.removeprefix("--").replace("_", "-") if word.startswith("--") else ""
        off = _FLAGS.get(flag.replace("no-", "", 1)) if "no-" in flag else None
        last = i + 1 == len(argv) or argv[i + 1].startswith("-")
        if flag in _FLAGS and last:
            given += [word, BARE[_FLAGS[flag]][0]]
        elif off is not None:
            given += [f"--{off.replace('_', '-')}", BARE[off][1]]
        else:
            given.append(word)
    return given


def parse(argv: Sequence[str], *, quiet: bool = False, others: Sequence[str] = ()) -> TrainConfig:
    """The validated configuration of a command line (without the program's name).

    quiet: print no help (ranks other than 0). others: options that the program takes besides, for
    advice. Raises UserError for flags that `check_flags` refuses, for an unreadable file, an
    unknown or ill-typed TOML key, or a value that breaks a rule; SystemExit after --help.
    """
    _refuse_gone(argv)
    words = _with_values(argv)
    if not any(word.startswith("--tyro-") for word in words):
        check_flags(words, others)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(list(argv))[0].config
    default = load_toml(Path(path)) if path else TrainConfig()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(
                TrainConfig,
                prog=program("fla-cp-train"),
                args=words,
                default=default,
                console_outputs=not quiet,
            )
    except BrokenPipeError:  # nobody reads --help to its end
        silence()
        raise SystemExit(0) from None
    except SystemExit as ended:
        if ended.code in (0, None):
            raise
        # a rule of tyro that check_flags does not have: its box in one line
        text = " ".join(errors.getvalue().translate(_BOX).split())
        raise UserError(f"the flags are refused: {text}") from None
    parallel = config.parallel.resolved(int(os.environ.get("WORLD_SIZE", "1")))
    config = with_recipe(dataclasses.replace(config, parallel=parallel, config=None))
    validate(config)
    return config


def load_toml(path: Path) -> TrainConfig:
    """The configuration in a TOML file: the defaults with the file's values. Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not valid TOML: {error}") from None
    return _from_table(TrainConfig, table, str(path), "")


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML that `load_toml` reads back; fields that are None are left out."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value):
            continue
        lines.append(f"[{section.name}]")
        for item in dataclasses.fields(value):
            entry = getattr(value, item.name)
            if entry is not None:
                # JSON strings, numbers and booleans are valid TOML, except for the character DEL
                value_text = json.dumps(entry, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{item.name} = {value_text}")
        lines.append("")
    return "\n".join(lines)


def _from_table(kind: type, table: dict, file: str, prefix: str) -> Any:
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind) if f.name != "config"]
    values = {}
    for key, value in table.items():
        name = prefix + key
        if name in GONE:
            raise UserError(f"--config: {name} in {file} is no longer an option; {GONE[name]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"--config: unknown key {name} in {file}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise UserError(f"--config: {name} in {file} must be a table, got {value!r}")
            values[key] = _from_table(hints[key], value, file, f"{name}.")
        else:
            if name in BARE and type(value) is bool:
                value = BARE[name][0 if value else 1]
            values[key] = _typed(hints[key], value, f"--config: {name} in {file}")
    return kind(**values)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value, as an instance of the annotated type. Raises UserError."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    wanted = [
        "one of " + ", ".join(map(repr, get_args(o))) if get_origin(o) is Literal else o.__name__
        for o in options
        if o is not type(None)
    ]
    raise UserError(f"{where} must be {' or '.join(wanted)}, got {value!r}")
