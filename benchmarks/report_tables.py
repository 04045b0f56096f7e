"""Tables of measured results, in Markdown; benchmarks/report.py puts them into pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks import units
from benchmarks.host import COUNTS
from benchmarks.shapes import SHAPES

MISSING = "not measured"

OPERATORS = {
    "kda": "Kimi Delta Attention (KDA), with norm, gate and sigmoid inside the operator",
    "gdn": "Gated delta rule, with given decays",
    "gdn-layer": "Gated delta rule as a layer calls it, from logits of gate and beta",
    "comba": "Comba, with given decays",
    "rwkv7": "RWKV-7, with given decays",
    "gdp2": "Gated delta product of two steps, with given decays",
    "gla": "Gated linear attention (GLA), with given decays",
    "simple_gla": "Simple GLA, with given decays",
}
HEADS = {
    "gqa-128": "16 on 2, K = V = 128",
    "gqa-256": "16 on 2, K = V = 256",
    "mha-128": "16 on 16, K = V = 128",
    "mla": "16 on 16, K = 192, V = 128",
}
"""The shapes of benchmarks/attention.py: query heads on key heads, channels."""
PEERS = {"fla": "FLA", "flashqla": "FlashQLA"}


Row = dict[str, Any]


class Result(NamedTuple):
    """One result file: its name without `.json`, and what it holds."""

    name: str
    data: Row

    @property
    def rows(self) -> list[Row]:
        return self.data.get("rows", [])

    @property
    def path(self) -> str:
        return f"benchmarks/results/current/{self.name}.json"


# cells and tables


def number(x: float | None) -> str:
    """Three or four digits, so that columns of one quantity stay readable."""
    if x is None:
        return MISSING
    size = abs(x)
    digits = 0 if x == 0 else 4 if size < 0.1 else 3 if size < 1 else 2 if size < 100 else 1
    return f"{x:.{digits}f}"


def whole(x: float | None) -> str:
    return MISSING if x is None else f"{x:.0f}"


def ratio(x: float | None) -> str:
    return MISSING if x is None else f"{x:.2f}x"


def slashed(values: Iterable[float | None], show: Callable[[float | None], str] = number) -> str:
    """Several numbers in one cell; one "not measured" where all are missing, or none."""
    found = [show(x) for x in values]
    return MISSING if set(found) <= {MISSING} else " / ".join(found)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(rows: Iterable[Any], *spec: tuple[str, Callable[[Any], str]]) -> str:
    """A table whose columns are pairs: the head, and the cell of a row."""
    return table([head for head, _ in spec], [[cell(row) for _, cell in spec] for row in rows])


def upper(text: str) -> str:
    """`text` with a capital letter at its start."""
    return text[:1].upper() + text[1:]


def facts(data: Row) -> str:
    """The hardware, versions, date and commit of a run."""
    found = [str(data.get("gpu", data.get("device", "GPU not recorded")))]
    for name, label in (("torch", "torch"), ("triton", "Triton"), ("ptxas", "ptxas")):
        found.append(f"{label} {data[name]}" if name in data else f"{label} not recorded")
    found.append(data.get("date", "date not recorded"))
    found.append(f"commit {data['commit']}" if data.get("commit") else "commit not recorded")
    return ", ".join(found)


def source(result: Result, root: str = "") -> str:
    """A link to the result's file, and its facts. root: the way from the page to the repository."""
    return f"[{result.name}.json]({root}{result.path}): {facts(result.data)}."


def described(result: Result, command: str) -> str:
    """The lines above a result's tables in docs/performance.md."""
    lines = [
        source(result, "../"),
        f"Command: {command}." if command else "No benchmark writes this file: see docs/log.md.",
    ]
    unit = units.shown(result.data.get("unit", ""))
    texts = {"unit": unit, "note": result.data.get("note", "").strip().rstrip(".")}
    return "\n".join(lines + [f"{upper(name)}: {text}." for name, text in texts.items() if text])


def shape(name: str, operator: str) -> str:
    """A named shape of `benchmarks.shapes` in words."""
    s = SHAPES[name]
    found = [f"T = {s.T}", f"H = {s.H}" if s.H == s.HV else f"{s.H} heads of q and k, {s.HV} of v"]
    found += [] if s.K == 128 else [f"K = V = {s.K}"]
    found += [] if operator != "kda" else ["safe gate"] if s.safe else ["any gate"]
    found += ["`disable_recompute`"] if s.disable_recompute else []
    found += [] if s.cu_seqlens is None else [f"{len(s.cu_seqlens) - 1} packed documents"]
    return ", ".join(found)


def joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, dict.fromkeys(values)))


def module(name: str, result: Result, *flags: str) -> str:
    return " ".join(("`python -m", f"benchmarks.{name}", *flags, f"--out {result.path}`"))


# operators


class Sides(NamedTuple):
    """One shape: our row, the peer's row, and the peer's time over ours by direction."""

    ours: Row
    peer: Row
    ratios: dict[str, float]


BOTH = ("forward", "both")


def ms(row: Row, direction: str, name: str = "ms") -> float | None:
    return row.get(direction, {}).get(name)


def sides(result: Result) -> list[Sides]:
    """The shapes that we ran; a side without a measurement is an empty row."""
    theirs = {r["shape"]: r for r in result.rows if r["op"] != "fla_cp"}
    ours = [r for r in result.rows if r["op"] == "fla_cp"]
    return [
        Sides(r, theirs.get(r["shape"], {}), dict(zip(BOTH, r.get("ratio", []), strict=False)))
        for r in ours
    ]


def peer_of(result: Result) -> str | None:
    return next((r["op"] for r in result.rows if r["op"] != "fla_cp"), None)


def operator_command(result: Result) -> str:
    ours = [s.ours for s in sides(result)]
    flags = [f"--op {result.data['operator']}", f"--shapes {joined(r['shape'] for r in ours)}"]
    flags += [f"--peer {peer_of(result)}"] if peer_of(result) else []
    flags += ["--forward-only"] if all("both" not in r for r in ours) else []
    flags += ["--stages"] if any("stages" in r for r in ours) else []
    return module("ops", result, *flags)


def beside_peer(result: Result) -> str:
    peer, operator = PEERS[peer_of(result) or ""], result.data["operator"]
    return columns(
        sides(result),
        ("shape", lambda s: shape(s.ours["shape"], operator)),
        ("forward, ms", lambda s: number(ms(s.ours, "forward"))),
        (peer, lambda s: number(ms(s.peer, "forward"))),
        ("ratio", lambda s: ratio(s.ratios.get("forward"))),
        ("forward + backward, ms", lambda s: number(ms(s.ours, "both"))),
        (peer, lambda s: number(ms(s.peer, "both"))),
        ("ratio", lambda s: ratio(s.ratios.get("both"))),
        ("peak GiB", lambda s: number(s.ours["peak_gib"])),
        (f"{peer}, peak GiB", lambda s: number(s.peer.get("peak_gib"))),
    ) + below(result)


def alone(result: Result) -> str:
    return columns(
        [s.ours for s in sides(result)],
        ("shape", lambda r: shape(r["shape"], result.data["operator"])),
        ("forward, ms", lambda r: number(ms(r, "forward"))),
        ("forward + backward, ms", lambda r: number(ms(r, "both"))),
        ("host, ms", lambda r: slashed(ms(r, d, "host_ms") for d in BOTH)),
        ("share of the bound", lambda r: slashed(ms(r, d, "share_of_floor") for d in BOTH)),
        ("peak GiB", lambda r: number(r["peak_gib"])),
        ("first call, s", lambda r: number(r["first_call_s"])),
    ) + below(result)


def below(result: Result) -> str:
    """The tables below one of an operator: the host's, and the stages', each if it was measured."""
    return of_host(result) + stages(result)


def of_host(result: Result) -> str:
    """A table of what the host does in our calls, if the run counted it."""
    rows = [s.ours for s in sides(result) if ms(s.ours, "forward", "launches") is not None]
    if not rows:
        return ""
    pairs = {"host, ms": "host_ms", "launches alone, ms": "bare_ms", "ratio": "host_over_bare"}
    counts = {name.replace("_", " "): name for name in COUNTS}
    found = columns(
        rows,
        ("shape", lambda r: shape(r["shape"], result.data["operator"])),
        *((head, both(name, number)) for head, name in pairs.items()),
        *_bare_in_autograd(rows),
        *_both_alone(rows, "in a chain, ms", "chained_host_ms"),
        *_both_alone(rows, "on one thread, ms", "one_thread_host_ms"),
        *_in_a_row(rows),
        *((head, both(name, whole)) for head, name in counts.items()),
    )
    title = "The host's work in a call, in the forward / in both directions"
    return f"\n\n{title}:\n\n{found}"


def _bare_in_autograd(rows: list[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """The columns of launches in autograd, in both directions, if they were measured."""
    if not any(ms(r, "both", "bare_autograd_ms") for r in rows):
        return []
    names = {
        "launches in autograd, ms": "bare_autograd_ms",
        "ratio in autograd": "host_over_bare_autograd",
    }
    return [
        (head, lambda r, name=name: number(ms(r, "both", name))) for head, name in names.items()
    ]


def _both_alone(rows: list[Row], head: str, name: str) -> list[tuple[str, Callable[[Row], str]]]:
    """The column of a time of both directions together, if it was measured."""
    if all(ms(r, "both", name) is None for r in rows):
        return []
    return [(head, lambda r: number(ms(r, "both", name)))]


def _in_a_row(rows: list[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """The columns of calls that follow each other, if they were measured."""
    if all(ms(r, "both", "steady_host_ms") is None for r in rows):
        return []
    alone = {
        "launches in autograd in a row, ms": "steady_bare_autograd_ms",
        "ratio in a row": "steady_host_over_bare_autograd",
    }
    return [
        ("in a row, ms", both("steady_host_ms", number)),
        *_both_alone(rows, "in a row on one thread, ms", "steady_one_thread_host_ms"),
        *_on_one_core(rows),
        *(column for head, name in alone.items() for column in _both_alone(rows, head, name)),
    ]


def _on_one_core(rows: list[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """The column of calls that follow each other in a process on one core, if they were timed."""
    name = "steady_one_core_host_ms"
    if all(ms(r, "both", name) is None for r in rows):
        return []
    return [("in a row on one core, ms", both(name, number))]


def both(name: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    """A cell with a fact of both directions."""
    return lambda r: slashed((ms(r, d, name) for d in BOTH if d in r), show)


def stages(result: Result) -> str:
    """A table of the operator's stages, if the run timed them."""
    timed: dict[str, dict[str, float]] = {
        r["shape"]: {
            n.removesuffix("_any").removesuffix("_head"): t for n, t in r["stages"].items()
        }
        for r in result.rows
        if r.get("stages")
    }
    names = list(dict.fromkeys(name for found in timed.values() for name in found))
    rows = [
        [shape(name, result.data["operator"]), *[number(found.get(n)) for n in names]]
        for name, found in timed.items()
    ]
    title = "\n\nTimes of the stages, each measured by itself, in ms:\n\n"
    return title + table(["shape", *names], rows) if timed else ""


# operators bound by memory, errors, and the host's work


def first_calls_command(result: Result) -> str:
    return module("first_call", result)


def first_calls(result: Result) -> str:
    return columns(
        [(row, call) for row in result.rows for call in row["calls"]],
        ("operator", lambda x: x[0]["operator"].upper()),
        ("cache", lambda x: x[0]["mode"]),
        ("imports, s", lambda x: number(x[0]["import torch"] + x[0]["import fla_cp"])),
        ("start of torch, s", lambda x: number(x[0]["start torch"])),
        ("T", lambda x: str(x[1]["T"])),
        ("first call, s", lambda x: number(x[1]["first"]["s"])),
        ("kernels compiled", lambda x: str(x[1]["first"]["compiled"])),
        ("later calls, ms", lambda x: number(1e3 * x[1]["again"])),
    )


def packings_command(result: Result) -> str:
    counts, tokens, heads = (
        joined(r[name] for r in result.rows) for name in ("packings", "T", "H")
    )
    flags = [f"--packings {counts}", f"--tokens {tokens}", f"--heads {heads}"]
    return module("host", result, *flags, f"--op {joined(r['op'] for r in result.rows)}")


def packings(result: Result) -> str:
    return columns(
        result.rows,
        ("calls", lambda r: f"{r['packings']} packings"),
        ("operator", lambda r: r["op"].upper()),
        ("H", lambda r: str(r["H"])),
        ("T", lambda r: str(r["T"])),
        ("known packing, ms a call", lambda r: number(r["one_ms"])),
        ("new packings, ms a call", lambda r: number(r["new_ms"])),
        ("ratio", lambda r: ratio(r["ratio"])),
        ("variants compiled meanwhile", lambda r: str(r["variants"])),
    )


# attention and layers


def attention_command(result: Result) -> str:
    return module("attention", result, f"--tokens {joined(r['T'] for r in result.rows)}")


def attention(result: Result) -> str:
    def over(direction: str) -> Callable[[Row], str]:
        return lambda r: ratio(r[f"torch_{direction}_ms"] / r[f"ours_{direction}_ms"])

    return columns(
        result.rows,
        ("heads", lambda r: HEADS[r["shape"]]),
        ("tokens", lambda r: f"{r['T']}, {r['documents']}"),
        ("forward, ms", lambda r: number(r["ours_forward_ms"])),
        ("PyTorch, ms", lambda r: number(r["torch_forward_ms"])),
        ("ratio", over("forward")),
        ("forward + backward, ms", lambda r: number(r["ours_both_ms"])),
        ("PyTorch, ms", lambda r: number(r["torch_both_ms"])),
        ("ratio", over("both")),
    )


def layer_host_command(result: Result) -> str:
    return module("layer_host", result)


def layer_host(result: Result) -> str:
    return columns(
        result.rows,
        ("layer", lambda r: OPERATORS[r["layer"]].split(",")[0]),
        ("tokens", lambda r: str(r["T"])),
        ("host, ms", both("host_ms", number)),
        ("torch calls", both("aten", whole)),
        ("kernels", both("kernels", whole)),
        ("autograd nodes", lambda r: str(r["nodes"])),
    )


def bandwidth_command(result: Result) -> str:
    peer = ["--peer fla"] if any("fla_ms" in r for r in result.rows) else []
    return module("bandwidth", result, *peer)


def bandwidth(result: Result) -> str:
    return columns(
        result.rows,
        ("operator", lambda r: r["op"]),
        ("ms", lambda r: number(r["ms"])),
        ("over a copy", lambda r: ratio(r["over_copy"])),
        ("FLA, ms", lambda r: number(r.get("fla_ms"))),
        ("ratio", lambda r: ratio(r.get("vs_fla"))),
    )


def precision_command(result: Result) -> str:
    peer = ["--peer fla"] if "FLA" in next(iter(result.data["errors"].values())) else []
    return module("precision", result, *peer)


def precision(result: Result) -> str:
    tables = []
    for op, errors in result.data["errors"].items():
        names = list(dict.fromkeys(n for found in errors.values() for n in found))
        rows = [
            [who, *[f"{found[n]:.1e}" if n in found else MISSING for n in names]]
            for who, found in errors.items()
        ]
        tables.append(f"Relative errors of `{op}`:\n\n" + table([op, *names], rows))
    times = columns(
        result.data.get("times", []),
        ("precision", lambda r: r["op"]),
        ("shape", lambda r: shape(r["shape"], r["op"].split()[0])),
        ("forward, ms", lambda r: number(ms(r, "forward"))),
        ("forward + backward, ms", lambda r: number(ms(r, "both"))),
        ("peak GiB", lambda r: number(r["peak_gib"])),
    )
    return "\n\n".join([*tables, "Times of both precisions, in turn:\n\n" + times])


def agreement_command(result: Result) -> str:
    launcher = f"`torchrun --nproc-per-node {result.data['ranks']} -m benchmarks.agreement"
    return f"{launcher} --out {result.path}`"


def agreement(result: Result) -> str:
    return columns(
        result.data["us"].items(),
        ("work", lambda item: item[0]),
        ("host, microseconds", lambda item: whole(item[1]["host"])),
        ("until the GPU is done, microseconds", lambda item: whole(item[1]["device"])),
    )


def checkpoint_command(result: Result) -> str:
    ranks = result.data["ranks"]
    run = f"torchrun --nproc-per-node {ranks} -m benchmarks.checkpoint --ranks {ranks}"
    return f"`{run} > {result.path}`"


def checkpoint(result: Result) -> str:
    found = result.data
    size = f"{found['bytes'] / 1e9:.1f} GB, {found['parameters'] / 1e6:.0f} M parameters"
    rows = [[name, number(seconds)] for name, seconds in found["seconds"].items()]
    return f"{size}, {found['ranks']} ranks:\n\n" + table(["step", "seconds"], rows)
