"""The argument parser of all programs except the trainer. It reports a mistake in one line."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fla_cp.train.exit_codes import MISTAKE
from fla_cp.train.started import program

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that ends after a mistake with one line `error: ..` and status MISTAKE.

    command: the installed program, such as "fla-cp-plot". The line names the argument, the rule and
    the value. Only rank 0 prints it, because all ranks have the same arguments. This class parses
    values of the types int and float itself, so that the line says what they must be. Options must
    not be abbreviated, because a new option could change the meaning of an abbreviation.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=program(command), allow_abbrev=False, **options)
        self._words: list[str] = []
        self.register("type", int, _number(int, "a whole number"))
        self.register("type", float, _number(float, "a number"))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        self._words = [*(sys.argv[1:] if args is None else args)]
        if any(action.nargs == "+" for action in self._get_positional_actions()):
            return super().parse_intermixed_args(args, namespace)  # some may follow an option
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the program. message: what argparse found, in its words."""
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {self._in_our_words(message)}", file=sys.stderr)
        raise SystemExit(MISTAKE)

    def _in_our_words(self, message: str) -> str:
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            return self._unknown(unknown[1].split()[0])
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            for word in self._words:  # an unknown option may be a misspelt one that is required
                if word.startswith("--") and word.partition("=")[0] not in self._option_names():
                    return self._unknown(word)
            return f"{missing[1].replace(', ', ' and ')} must be given; {self.prog} --help says how"
        argument = re.fullmatch(r"argument (\S+?): (.*)", message, re.DOTALL)
        if not argument:
            return message
        name, rest = argument.groups()
        if choice := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", rest, re.DOTALL):
            return f"{name} must be one of {choice[2].replace(chr(39), '')}, got {choice[1]}"
        if rest == "expected one argument":
            return f"{name} must have a value"
        return f"{name} {rest}"

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            own = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
            only = "the only argument" + "s" * (len(own) > 1)
            return f"{' and '.join(own)} must be {only} without --, got {word!r} as well"
        flag, options = word.partition("=")[0], self._option_names()
        near = [name for name in options if len(flag) > 2 and name.startswith(flag)]
        near = near[:3] or difflib.get_close_matches(flag, options, n=1)
        advice = f"did you mean {' or '.join(near)}?" if near else f"{self.prog} --help lists all"
        return f"unknown option {flag}; {advice}"

    def _option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def check_seed(name: str, seed: int) -> None:
    """Raises ValueError for a seed that PyTorch's generators do not take. name: of the argument."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{name} must be from -2^63 to 2^64 - 1, got {seed}")


def by_flags(call: Callable[..., _T], **arguments: Any) -> _T:
    """What a call returns. If the call's error begins with the name of an argument, the flag of
    this argument takes the place of the name."""
    try:
        return call(**arguments)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in arguments:
            raise
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from None


def file_among(*paths: Path) -> Path | None:
    """The first of these paths that exists and is no folder; None if there is none."""
    return next((p for p in paths if os.path.exists(p) and not os.path.isdir(p)), None)


def _number(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """A type of arguments. kind: int or float."""

    def parsed(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None

    return parsed
