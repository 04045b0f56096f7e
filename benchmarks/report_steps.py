"""Tables of what `benchmarks.train` and `benchmarks.hybrid` measured, in Markdown.

benchmarks/report.py shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.report_tables import (
    MISSING,
    Result,
    Row,
    columns,
    joined,
    module,
    number,
    ratio,
    source,
    table,
    whole,
)


class Steps(NamedTuple):
    """One case of `benchmarks.train`: our row, the row of FLA's model for the same work, which runs
    on one GPU, and our rows of the same work by GPUs. What was not measured is an empty row."""

    ours: Row
    peer: Row
    by_gpus: dict[int, Row]

    @property
    def ratio(self) -> float | None:
        """Our tokens/s over those of FLA's model, on one GPU each."""
        return _over(self.ours, self.peer)

    @property
    def speed_up(self) -> float | None:
        """Tokens/s over those of one GPU."""
        return _over(self.ours, self.by_gpus.get(1, {}))


def _over(a: Row, b: Row) -> float | None:
    name = "tokens_per_second"
    return a[name] / b[name] if name in a and name in b else None


def steps(result: Result | None) -> list[Steps]:
    """Our rows beside those of FLA's model.

    FLA's row has the same flags of the trainer or, if there is none, no flags.
    """
    rows = [] if result is None else result.rows
    names = ("model", "tokens", "data")
    found = []
    for row in (r for r in rows if r["who"] == "fla_cp"):
        same = [r for r in rows if all(r[n] == row[n] for n in names)]
        peers = {r["flags"]: r for r in same if r["who"] != "fla_cp" and r["gpus"] == row["gpus"]}
        alike = {r["gpus"]: r for r in same if r["who"] == "fla_cp" and r["flags"] == row["flags"]}
        found.append(Steps(row, peers.get(row["flags"], peers.get("", {})), alike))
    return found


def steps_command(result: Result) -> str:
    """One command or, if the cases are not all combinations of some values, one for each model and
    its flags. Each adds its rows to the same file."""
    ours = [r for r in result.rows if r["who"] == "fla_cp"]
    names = {"models": "model", "seq-len": "tokens", "data": "data", "gpus": "gpus"}
    values = [len({r[name] for r in ours}) for name in (*names.values(), "flags")]
    together = len(ours) == math.prod(values)
    more = ["--peer fla"] if any(r["who"] == "fla" for r in result.rows) else []
    more += ["--profile"] if any("profile" in r for r in ours) else []

    def command(rows: Sequence[Row]) -> str:
        flags = [f"--{flag} {joined(r[name] for r in rows)}" for flag, name in names.items()]
        given = dict.fromkeys(r["flags"] for r in rows)
        flags += [f'--flags "{text}"' for text in given] if set(given) != {""} else []
        return module("train", result, *flags, *more)

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in ours:
        key = ("", "") if together else (row["model"], row["flags"])
        groups.setdefault(key, []).append(row)
    return ", then ".join(map(command, groups.values()))


def speed(row: Row) -> str:
    """Tokens/s, or why there are none."""
    return row["error"] if "error" in row else whole(row.get("tokens_per_second"))


def percent(x: float | None) -> str:
    return MISSING if x is None else f"{100 * x:.1f}%"


def document(row: Row) -> str:
    return "one document" if row["data"] == "one" else "packed documents"


def training_steps(result: Result) -> str:
    found = steps(result)
    flags = any(s.ours["flags"] for s in found)

    def on_one(cell: Callable[[Steps], str]) -> Callable[[Steps], str]:
        return lambda s: "-" if s.ours["gpus"] > 1 else cell(s)  # FLA's model runs on one GPU

    text = columns(
        found,
        ("model", lambda s: s.ours["model"]),
        ("tokens", lambda s: f"{s.ours['tokens']}, {document(s.ours)}"),
        *([("flags", lambda s: f"`{s.ours['flags']}`" if s.ours["flags"] else "-")] * flags),
        ("GPUs", lambda s: str(s.ours["gpus"])),
        ("tokens/s", lambda s: speed(s.ours)),
        ("over one GPU", lambda s: ratio(s.speed_up) if s.ours["gpus"] > 1 else "-"),
        ("MFU", lambda s: percent(s.ours.get("mfu"))),
        ("step, ms", lambda s: number(s.ours.get("step_ms"))),
        ("host, ms", lambda s: number(s.ours.get("host_ms"))),
        ("peak GiB", lambda s: number(s.ours.get("peak_gib"))),
        ("FLA, tokens/s", on_one(lambda s: speed(s.peer))),
        ("FLA, peak GiB", on_one(lambda s: number(s.peer.get("peak_gib")))),
        ("ratio", on_one(lambda s: ratio(s.ratio))),
    )
    return text + profiles(result)


def profiles(result: Result, kernels: int = 5) -> str:
    """A table of what the profiled steps spend their time on, if there are any."""
    rows = [r for r in result.rows if "profile" in r]
    if not rows:
        return ""
    kinds = list(dict.fromkeys(name for r in rows for name in r["profile"]["kinds"]))
    side = {"fla_cp": "", "fla": "FLA, "}

    def name(r: Row) -> str:
        gpus = f"{r['gpus']} GPU{'s' * (r['gpus'] > 1)}"
        flags = f", `{r['flags']}`" if r["flags"] else ""
        return f"{side[r['who']]}{r['model']}, {r['tokens']}, {document(r)}, {gpus}{flags}"

    shares = columns(
        rows,
        ("step", name),
        ("ms", lambda r: number(r["profile"]["wall_ms"])),
        ("kernels run", lambda r: percent(r["profile"]["busy"])),
        ("without exchanges", lambda r: percent(r["profile"]["computing"])),
        *((f"{kind}, ms", _of_kind(kind)) for kind in kinds),
    )
    longest = [
        [name(r), f"`{k['name'].replace('|', '/')[:60]}`", number(k["ms"]), number(k["calls"])]
        for r in rows
        for k in r["profile"]["kernels"][:kernels]
    ]
    return (
        "\n\nThe share of the profiled steps' time in which kernels run, and time by kind of "
        f"kernel:\n\n{shares}\n\nThe kernels that take longest in a step:\n\n"
        f"{table(['step', 'kernel', 'ms', 'calls'], longest)}"
    )


def _of_kind(kind: str) -> Callable[[Row], str]:
    return lambda r: number(r["profile"]["kinds"].get(kind, 0.0))


def readme_steps(
    results: Mapping[str, Result | None], tokens: int, several: Sequence[Result]
) -> str:
    """README's list: one document, with the fastest flags of each model. results: by model.
    tokens: its length, or the greatest that was measured for a model. several: runs on one and on
    several GPUs, of which the fastest step on the most GPUs is shown."""
    found: list[tuple[Steps, Result]] = []
    for model, result in results.items():
        of_one = (s for s in steps(result) if s.ours["data"] == "one" and s.ours["gpus"] == 1)
        mine = [s for s in of_one if s.ours["model"] == model and "tokens_per_second" in s.ours]
        here = [s for s in mine if s.ours["tokens"] == tokens]
        if result is None or not mine:
            continue
        length = tokens if here else max(s.ours["tokens"] for s in mine)
        same = (s for s in mine if s.ours["tokens"] == length)
        best = max(same, key=lambda s: s.ours["tokens_per_second"])
        on_two = Steps(best.by_gpus.get(2, {}), {}, best.by_gpus)
        found += [(s, result) for s in (best, on_two) if s is best or s.speed_up is not None]
    for result in several:
        shared = [s for s in steps(result) if s.ours["data"] == "one" and s.ours["gpus"] > 1]
        shared = [s for s in shared if s.speed_up is not None]
        if shared:
            most = max(shared, key=lambda s: (s.ours["gpus"], s.ours["tokens_per_second"]))
            found.append((most, result))
    lines = [f"- {_in_words(step)} {source(result)}{_note(result)}" for step, result in found]
    return "\n".join(lines) or f"Training steps, compared with FLA's own model class: {MISSING}."


def _in_words(steps: Steps) -> str:
    """A step's speed, and that of one GPU or of FLA's model in the same run."""
    ours, gpus = steps.ours, steps.ours["gpus"]
    with_flags = f", `{ours['flags']}`" if ours["flags"] else ""
    text = (
        f"Training {ours['model']} on one document of {ours['tokens']} tokens, "
        f"{gpus} GPU{'s' * (gpus > 1)}{with_flags}: {speed(ours)} tokens/s"
    )
    if "mfu" in ours:
        text += f", MFU {percent(ours['mfu'])}"
    if gpus > 1:
        return f"{text}, {ratio(steps.speed_up)} the {speed(steps.by_gpus[1])} tokens/s of one GPU."
    if steps.ratio is None:
        return f"{text}."
    peer = f"the {speed(steps.peer)} tokens/s of FLA's own model class"
    return f"{text}, {ratio(steps.ratio)} {peer}."


def _note(result: Result) -> str:
    return f" Note: {result.data['note']}." if result.data.get("note") else ""


def hybrid_command(result: Result) -> str:
    """What measures a stack of hybrid layers again."""
    flags = f"--ranks {joined(r['ranks'] for r in result.rows)}"
    tokens = f"--tokens {joined(r['T'] for r in result.rows)}"
    patterns = ";".join(dict.fromkeys(r["pattern"] for r in result.rows))
    given = [flags, tokens, f"--patterns '{patterns}'"]
    if "layouts" in result.data:  # files from before 2026-11-25 have both, with steps as by default
        given.append(f"--layouts {result.data['layouts']} --together {result.data['together']}")
    return module("hybrid", result, *given)


def hybrid(result: Result) -> str:
    """A row for each stack, length, number of GPUs and kind of ranges."""
    return columns(
        result.rows,
        ("layers", lambda r: r["pattern"]),
        ("tokens", lambda r: str(r["T"])),
        ("GPUs", lambda r: str(r["ranks"])),
        ("ranges", lambda r: r["layout"] if r["ranks"] > 1 else "all"),
        ("ms", lambda r: r.get("error") or number(r.get("ms"))),
        ("tokens/s", lambda r: whole(r.get("tokens_s"))),
        ("ratio", lambda r: ratio(r.get("ratio"))),
        ("balance", lambda r: number(r.get("balance"))),
        ("peak GiB", lambda r: number(r.get("peak_gib"))),
    )
