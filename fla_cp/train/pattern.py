"""Which mixer each block has, and how rotary positions are stretched, as texts of the command line.

A pattern is a list of mixers, such as `kda*3,mla`: three blocks of KDA, then one of MLA. It repeats
over the blocks; the last repetition may be cut.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from fla_cp.train.config import ModelConfig

Mixer = Literal["kda", "gdn", "comba", "gdp", "gla", "simple_gla", "attention", "mla"]

SOFTMAX = ("attention", "mla")
"""The mixers that are softmax attention."""

PATTERNS = {
    # layers 4, 8, 12, 16, 20, 24 and 27 of 27
    "kimi-linear-small": "kda*3,mla",
    "qwen3-next-small": "gdn*3,attention",
    "kimi-linear": ",".join(["kda*3,mla"] * 6 + ["kda*2,mla"]),
    "qwen3-next": "gdn*3,attention",
}
"""The patterns of named sizes. All other sizes have kda in every block."""


def parse_pattern(text: str) -> tuple[str, ...]:
    """The mixers of one repetition. Raises ValueError that names the word that is wrong."""
    mixers: list[str] = []
    for word in text.split(","):
        name, star, times = word.strip().partition("*")
        if name not in get_args(Mixer):
            known = ", ".join(get_args(Mixer))
            raise ValueError(f"{name!r} in {text!r} must be a mixer: {known}")
        if star and not (times.isascii() and times.isdigit() and int(times)):
            raise ValueError(f"{word.strip()!r} in {text!r} must be {name}*COUNT, COUNT from 1")
        mixers += [name] * (int(times) if star else 1)
    return tuple(mixers)


def block_mixers(pattern: str, layers: int) -> tuple[str, ...]:
    """The mixer of each block."""
    return tuple(islice(cycle(parse_pattern(pattern)), layers))


def mixers_of(config: ModelConfig) -> tuple[str, ...]:
    """The mixers of one repetition. Raises ValueError for a pattern that names none."""
    return parse_pattern(config.pattern or config.mixer or "kda")


class Stretch(NamedTuple):
    """YaRN's factor, and the tokens of the sequences before; None: not said."""

    factor: float
    original: int | None = None

    def __str__(self) -> str:
        return f"yarn:{self.factor:g}" + ("" if self.original is None else f":{self.original}")


def parse_stretch(text: str) -> Stretch:
    """`yarn:FACTOR` or `yarn:FACTOR:ORIGINAL`. Raises ValueError that says what is wrong."""
    kind, *numbers = text.split(":")
    try:
        if kind != "yarn" or len(numbers) not in (1, 2):
            raise ValueError
        found = Stretch(float(numbers[0]), *map(int, numbers[1:]))
    except ValueError:
        raise ValueError(f"must be yarn:FACTOR or yarn:FACTOR:ORIGINAL, got {text!r}") from None
    if not 1 <= found.factor < float("inf"):
        raise ValueError(f"must have a FACTOR from 1, got {text!r}")
    if found.original is not None and found.original < 1:
        raise ValueError(f"must have an ORIGINAL from 1, got {text!r}")
    return found
