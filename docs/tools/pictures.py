"""The pictures of docs/concepts.md, which `python docs/tools/pictures.py` writes.

What they say comes from the package: which rank owns which tokens from the functions that divide
them, and where states cross from the table that an exchange reads.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from fla_cp import contiguous_token_ranges, zigzag_token_ranges
from fla_cp.partition.slots import Links, link_slots

Owned = Sequence[Sequence[tuple[int, int]]]

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
"""The colour of each rank."""

INK, PALE = "#333333", "#dddddd"
DOCUMENTS, TOKENS = (0, 500, 640, 1000), 1000
"""The batch of the pictures: three documents."""

LEFT, WIDTH = 110, 600
"""Where the line of tokens begins, and how long it is."""


def picture(height: int, parts: Sequence[str]) -> str:
    """An SVG with a white ground, so that it reads on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    ground = f'<rect width="760" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    drawn = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        f'stroke="white" stroke-width="2"/>'
    )
    ink = INK if fill in (PALE, "white") else "white"
    return drawn + text(x + width / 2, y + height / 2 + 5, words, fill=ink) if words else drawn


def line(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" {style}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line whose tip is drawn, since not every program draws markers."""
    length = math.hypot(x2 - x1, y2 - y1)
    along, across = (x2 - x1) / length, (y2 - y1) / length
    back, half = 9, 4
    corners = [(x2, y2)]
    for side in (half, -half):
        corners.append((x2 - back * along + side * across, y2 - back * across - side * along))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return line(x1, y1, x2, y2, 'stroke-width="1.5"') + f'<polygon points="{points}"/>'


def at(token: float) -> float:
    return LEFT + WIDTH * token / TOKENS


def documents(y: float) -> Iterator[str]:
    """The batch, as a row of boxes."""
    yield text(LEFT - 10, y + 16, "documents", "end")
    for n, (lo, hi) in enumerate(pairwise(DOCUMENTS)):
        yield box(at(lo), y, at(hi) - at(lo), 24, PALE, f"document {n}")


def owned(y: float, ranges: Owned) -> Iterator[str]:
    """Who owns the tokens, as a row of boxes, with a line where a document ends."""
    for rank, own in enumerate(ranges):
        for lo, hi in own:
            yield box(at(lo), y, at(hi) - at(lo), 34, RANKS[rank], f"rank {rank}")
    for edge in DOCUMENTS[1:-1]:
        yield line(at(edge), y - 4, at(edge), y + 38, 'stroke-width="2" stroke-dasharray="4 3"')


def links(ranges: Owned) -> tuple[Links, list[tuple[int, int]]]:
    """The table of an exchange, and the token range of each of its slots."""
    own = tuple(tuple(r) for r in ranges)
    return link_slots(DOCUMENTS, own), sorted(pair for r in own for pair in r)


def crossings(y: float, ranges: Owned, mirrored: bool) -> Iterator[str]:
    """An arrow at each edge over which something travels: states, or mirrored their gradients."""
    table, slots = links(ranges)
    for s, goes_on in enumerate(table.continues):
        if goes_on:
            x = at(slots[s][0])
            ends = (x + 18, x - 18) if mirrored else (x - 18, x + 18)
            yield arrow(ends[0], y, ends[1], y)
            yield text(x, y - 7, "dS" if mirrored else "S")


def maps() -> str:
    """Tokens become one map for each segment; maps join; a state enters each segment."""
    parts = [text(LEFT - 10, 46, "tokens", "end")]
    for n in range(24):
        rank = n // 8
        parts.append(box(LEFT + 25 * n, 30, 25, 24, RANKS[rank]))
    for rank in range(3):
        x = LEFT + 200 * rank
        parts += [
            text(x + 100, 20, f"segment of rank {rank}"),
            arrow(x + 100, 58, x + 100, 92),
            box(x + 40, 96, 120, 34, RANKS[rank], f"M{rank}, B{rank}"),
        ]
    parts += [
        text(LEFT - 10, 78, "1. summarise", "end"),
        text(LEFT - 10, 118, "maps", "end"),
        text(LEFT - 10, 170, "2. carry", "end"),
        text(LEFT - 10, 242, "3. run", "end"),
    ]
    states = ["S0 (initial)", "S1 = M0 S0 + B0", "S2 = M1 S1 + B1"]
    for rank, state in enumerate(states):
        x = LEFT + 200 * rank
        parts.append(box(x + 20, 166, 160, 30, PALE, state))
        parts.append(arrow(x + 100, 198, x + 100, 226))
        parts.append(box(x, 230, 200, 30, RANKS[rank], f"outputs of rank {rank}"))
        if rank:
            parts.append(arrow(x - 60, 132, x + 20, 164))
            parts.append(arrow(x - 20, 181, x + 18, 181))
    return picture(276, parts)


def ownership() -> str:
    """The ranges of both layouts over one batch."""
    parts = list(documents(20))
    for y, name, divide in (
        (76, "contiguous", contiguous_token_ranges),
        (146, "zig-zag", zigzag_token_ranges),
    ):
        parts.append(text(LEFT - 10, y + 22, name, "end"))
        parts += owned(y, divide(TOKENS, 4))
    return picture(200, parts)


def exchange() -> str:
    """What crosses ranks, forward and backward, for both layouts."""
    parts = list(documents(20))
    for y, name, divide in (
        (106, "contiguous", contiguous_token_ranges),
        (236, "zig-zag", zigzag_token_ranges),
    ):
        ranges = divide(TOKENS, 4)
        parts += [
            text(LEFT - 10, y - 8, "forward", "end"),
            text(LEFT - 10, y + 22, name, "end"),
            text(LEFT - 10, y + 63, "backward", "end"),
        ]
        parts += owned(y, ranges)
        parts += crossings(y - 12, ranges, mirrored=False)
        parts += crossings(y + 59, ranges, mirrored=True)
    return picture(320, parts)


def pictures() -> dict[str, str]:
    """The text of each picture, by its file's name."""
    return {"maps.svg": maps(), "ownership.svg": ownership(), "exchange.svg": exchange()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
