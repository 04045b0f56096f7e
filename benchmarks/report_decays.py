"""Tables and pictures of `benchmarks.decays` for benchmarks/report.py and benchmarks/plot.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.report_tables import (
    PEERS,
    Result,
    Row,
    columns,
    joined,
    module,
    number,
    ratio,
    slashed,
    source,
)

OPERATORS = {"kda": "KDA", "gdn": "Gated delta rule"}
WHO = PEERS | {"cudnn": "cuDNN", "fla_cp": "fla_cp", "fla_cp-kept": "fla_cp, `disable_recompute`"}
DIRECTIONS = {"forward": "forward", "both": "forward + backward"}


def command(result: Result) -> str:
    flags = [f"--op {joined(result.data['ops'])}", f"--peers {joined(result.data['peers'])}"]
    return module("decays", result, *flags)


def typical(row: Row, direction: str) -> float | None:
    """The mean of the turns' times, which are ms."""
    times = row.get(direction)
    return statistics.mean(times) if times else None


def tables(result: Result) -> str:
    """All tables of a result, and its pictures, which lie beside the page."""
    parts = []
    for op in dict.fromkeys(r["operator"] for r in result.rows):
        rows = [r for r in result.rows if r["operator"] == op]
        parts.append(f"{OPERATORS[op]}:\n\n" + by_decay(rows))
    found = [f"{name} {version}" for name, version in result.data.get("versions", {}).items()]
    parts += [f"Peers: {', '.join(found)}."] if found else []
    picture = f"![Times by decay, from {result.name}.json]({result.name}.png)"
    parts.append(picture)
    if rows := result.data.get("stages"):
        parts.append(of_stages(rows, result.data["gb_s"]["copy"]))
        picture = f"{result.name}-stages.png"
        parts.append(f"![Times of stages and their floors, from {result.name}.json]({picture})")
    elif reason := result.data.get("no_stages"):
        parts.append(f"The stages were not timed: {reason}.")
    return "\n\n".join(parts)


def by_decay(rows: list[Row]) -> str:
    """One operator's times, in each turn, and our time in relation to that of each peer."""
    ours = {r["decay"]: r for r in rows if r["op"] == "fla_cp"}

    def turns(row: Row, direction: str) -> str:
        """The times, or once in a row why there are none."""
        if direction in row:
            return " / ".join(map(number, row[direction]))
        missing = next(d for d in DIRECTIONS if d not in row)
        return row["reason"] if direction == missing else ""

    def over(row: Row, direction: str) -> str:
        mine, theirs = (typical(r, direction) for r in (ours[row["decay"]], row))
        return ratio(theirs / mine) if mine and theirs else ""

    def apart(row: Row) -> str:
        return " / ".join(f"{x:.1e}" for x in row.get("difference", {}).values())

    return columns(
        rows,
        ("decay", lambda r: r["decay"]),
        ("mean log decay", lambda r: f"{r['mean_log_decay']:.3f}"),
        ("", lambda r: WHO[r["op"]]),
        ("forward, ms", lambda r: turns(r, "forward")),
        ("over fla_cp", lambda r: over(r, "forward")),
        ("forward + backward, ms", lambda r: turns(r, "both")),
        ("over fla_cp", lambda r: over(r, "both")),
        ("difference, o / gradients", apart),
    )


def readme(result: Result) -> str:
    """README's table of one operator beside its peers, and where it comes from."""
    by_decay: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        by_decay.setdefault(row["decay"], {})[row["op"]] = row
    peers = [who for who in result.data["peers"] if any(who in x for x in by_decay.values())]

    def times(row: Row) -> str:
        return slashed(typical(row, direction) for direction in DIRECTIONS)

    def ratios(found: dict[str, Row], who: str) -> str:
        pairs = [[typical(found.get(x, {}), d) for x in (who, "fla_cp")] for d in DIRECTIONS]
        return slashed((a / b if a and b else None for a, b in pairs), ratio)

    shown: list[tuple[str, Callable[[dict[str, Row]], str]]] = []
    for who in peers:
        shown.append((f"{WHO[who]}, ms", lambda x, who=who: times(x.get(who, {}))))
        shown.append(("ratio", lambda x, who=who: ratios(x, who)))
    text = columns(
        list(by_decay.values()),
        ("decay", lambda x: x["fla_cp"]["decay"]),
        ("mean log decay", lambda x: f"{x['fla_cp']['mean_log_decay']:.2f}"),
        ("fla_cp, ms", lambda x: times(x["fla_cp"])),
        *shown,
    )
    return f"{text}\n\n{source(result)}"


def of_stages(rows: list[Row], gb_s: float) -> str:
    said = (
        "The next table has the stages of KDA in one call, forward and backward, with drawn "
        f"decays. The floor is the time of a stage's traffic at {gb_s:.0f} GB/s, which a copy "
        "reached in the same run; each tensor counts once for each kernel that reads or writes it. "
        "A stage that mostly reads, or reads what is still in the L2 cache, can take a little less:"
    )
    total = {"stage": "all", "kernels": [k for r in rows for k in r["kernels"]]}
    total |= {name: sum(r[name] for r in rows) for name in ("gb", "floor_ms", "ms")}
    total["over_floor"] = total["ms"] / total["floor_ms"]
    table = columns(
        [*rows, total],
        ("stage", lambda r: r["stage"]),
        ("launches", lambda r: str(len(r["kernels"]))),
        ("GB", lambda r: number(r["gb"])),
        ("floor, ms", lambda r: number(r["floor_ms"])),
        ("ms", lambda r: number(r["ms"])),
        ("over the floor", lambda r: ratio(r["over_floor"])),
    )
    return f"{said}\n\n{table}"


def plot_decays(plt: Any, data: Row, out: Path) -> None:
    """Bars of each operator's times by decay, of all that were timed, one panel a direction."""
    ops = list(dict.fromkeys(r["operator"] for r in data["rows"]))
    size = (13, 3.8 * len(ops))
    figure, axes = plt.subplots(len(ops), 2, figsize=size, squeeze=False)
    for op, line in zip(ops, axes, strict=True):
        rows = [r for r in data["rows"] if r["operator"] == op]
        decays = list(dict.fromkeys(r["decay"] for r in rows))
        color = {who: f"C{n}" for n, who in enumerate(dict.fromkeys(r["op"] for r in rows))}
        for axis, (direction, title) in zip(line, DIRECTIONS.items(), strict=True):
            timed = list(dict.fromkeys(r["op"] for r in rows if direction in r))
            for n, who in enumerate(timed):
                ms = {r["decay"]: typical(r, direction) for r in rows if r["op"] == who}
                here = [d for d in decays if ms.get(d) is not None]
                at = [decays.index(d) + 0.8 * n / len(timed) for d in here]
                heights = [ms[d] for d in here]
                label = WHO[who].replace("`", "")
                look = {"color": color[who], "align": "edge", "label": label}
                bars = axis.bar(at, heights, 0.8 / len(timed), **look)
                axis.bar_label(bars, fmt="%.2f", fontsize="x-small", padding=1)
            axis.set_xticks([n + 0.4 for n in range(len(decays))], decays)
            axis.set(ylabel="ms", title=f"{OPERATORS[op]}, {title}")
            axis.margins(y=0.12)
        legend = dict(zip(*reversed(line[0].get_legend_handles_labels()), strict=True))
        legend |= dict(zip(*reversed(line[1].get_legend_handles_labels()), strict=True))
        line[1].legend(legend.values(), legend, loc="upper left", bbox_to_anchor=(1.02, 1))
    finish(figure, data, "times by decay", out)


def plot_stages(plt: Any, data: Row, out: Path) -> None:
    """Bars of each stage's time beside the time of its traffic."""
    rows = data["stages"]
    figure, axis = plt.subplots(figsize=(8.5, 0.6 + 0.62 * len(rows)))
    for offset, name, label in ((0.0, "ms", "measured"), (0.4, "floor_ms", "its traffic")):
        at = [n + offset for n in range(len(rows))]
        bars = axis.barh(at, [r[name] for r in rows], 0.4, align="edge", label=label)
        if name == "ms":
            over = [f"{r['ms']:.2f} ms, {r['over_floor']:.2f}x" for r in rows]
            axis.bar_label(bars, over, fontsize="small", padding=3)
    axis.set_yticks([n + 0.4 for n in range(len(rows))], [r["stage"] for r in rows])
    axis.invert_yaxis()
    axis.margins(x=0.22)
    axis.set_xlabel(f"ms; traffic at {data['gb_s']['copy']:.0f} GB/s, the bandwidth of a copy")
    axis.legend(loc="lower right")
    finish(figure, data, "KDA, stages of a forward and a backward", out)


def finish(figure: Any, data: Row, title: str, out: Path) -> None:
    facts = ("bf16", data.get("gpu", "CPU"), data["date"])
    figure.suptitle(", ".join((title, *facts)))
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def pictures(plt: Any, data: Row, out: Path) -> Iterable[Path]:
    """Draws a result of `benchmarks.decays`, and its stages, if it has them, into a file of their
    own beside `out`. Returns what was written."""
    plot_decays(plt, data, out)
    if not data.get("stages"):
        return (out,)
    beside = out.with_name(f"{out.stem}-stages{out.suffix}")
    plot_stages(plt, data, beside)
    return (out, beside)
