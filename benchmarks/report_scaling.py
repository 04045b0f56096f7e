"""Tables of what was measured on several GPUs: operator, layer, runs of the trainer, exchanges."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report_tables import (
    MISSING,
    Result,
    Row,
    both,
    columns,
    joined,
    module,
    ms,
    number,
    ratio,
    slashed,
    table,
    upper,
    whole,
)


def scaling_command(result: Result) -> str:
    rows = result.rows
    strong = joined(r["T"] for r in rows if r["kind"] == "strong")
    weak = joined(r["T"] // r["ranks"] for r in rows if r["kind"] == "weak")
    flags = [f"--ranks {joined(r['ranks'] for r in rows)}", f"--tokens {strong}", f"--local {weak}"]
    return module("cp_scaling", result, *flags, f"--schemes {joined(r['scheme'] for r in rows)}")


def step_time(row: Row | None) -> str:
    return MISSING if row is None else row["error"] if "error" in row else number(row["ms"])


def speed_up(rows: list[Row], row: Row | None) -> float | None:
    """One GPU's time for the same tokens over this time; None where either is missing."""
    if row is None or "ms" not in row:
        return None
    work = {name: row[name] for name in ("op", "kind", "T")} | {"ranks": 1}
    one = next((r for r in rows if work.items() <= r.items()), {})
    return one["ms"] / row["ms"] if "ms" in one else None


def tokens(row: Row) -> str:
    strong = row["kind"] == "strong"
    return f"T = {row['T']}" if strong else f"{row['T'] // row['ranks']} tokens a GPU"


def scheme(row: Row) -> str:
    used = row.get("used", row["scheme"])
    return row["scheme"] if used == row["scheme"] else f"{row['scheme']} ({used})"


def scaling(result: Result, op: str) -> str:
    rows = [r for r in result.rows if r["op"] == op]
    return columns(
        rows,
        ("work", tokens),
        ("GPUs", lambda r: str(r["ranks"])),
        ("exchange", scheme),
        ("ms", step_time),
        ("speed-up", lambda r: ratio(speed_up(rows, r)) if r["kind"] == "strong" else "-"),
        ("efficiency", lambda r: number(r.get("efficiency"))),
        ("waiting, ms", lambda r: number(r.get("exposed_ms"))),
        ("peak GiB", lambda r: number(r.get("peak_gib"))),
        ("MiB received", lambda r: number(r["bytes"] / 2**20)),
        *of_host(rows),
    )


def of_host(rows: list[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """Columns of what the host does in a forward / in a forward and a backward, its exchanges
    included, if any row has them. Counted is what the replayed programs do."""
    names = {"host, ms": "host_ms", "host on one thread, ms": "one_thread_host_ms"}
    names |= {"host in a row, ms": "steady_host_ms"}
    names |= {"in a row on one thread, ms": "steady_one_thread_host_ms"}
    names |= {"launches": "launches", "torch ops": "torch_ops"}
    return [
        (head, both(name, number if name.endswith("host_ms") else whole))
        for head, name in names.items()
        if any(ms(r, "both", name) is not None for r in rows)
    ]


def training(result: Result) -> str:
    common = (
        ("cp", lambda r: str(r["cp"])),
        ("tokens of the sequence", lambda r: str(r.get("seq_len", r.get("tokens")))),
        ("peak GiB", lambda r: number(r["peak_gib"])),
    )
    if "tokens_per_second" in result.rows[0]:
        return columns(
            result.rows,
            *common,
            ("tokens/s", lambda r: whole(r["tokens_per_second"])),
            ("tokens/s a GPU", lambda r: whole(r["per_gpu"])),
            ("waiting for exchanges, ms a step", lambda r: number(r["exchange_ms"])),
        )
    return columns(
        result.rows,
        *common,
        ("first step shown", lambda r: str(r.get("from_step", 1))),
        ("1000 tokens/s a GPU, by step", lambda r: " ".join(map(str, r["ktokens_s_a_gpu"]))),
    )


def exchange_command(result: Result) -> str:
    ranks = dict.fromkeys(str(r["ranks"]) for r in result.rows)
    return ", ".join(module("exchange", result, n) for n in ranks)


def exchange(result: Result) -> str:
    names = [n for n in result.rows[0] if n not in ("ranks", "rank", "equal")]
    rows = [
        [str(r["ranks"]), str(r["rank"]), *[number(r.get(n)) for n in names]] for r in result.rows
    ]
    return table(["GPUs", "rank", *names], rows)


def overlap(result: Result) -> str:
    tables = [
        columns(
            result.rows,
            ("what", lambda r: "operator" if r["op"] == "op" else r["op"]),
            ("T", lambda r: str(r["T"])),
            ("GPUs", lambda r: str(r["ranks"])),
            ("exchange", lambda r: r["exchange"]),
            ("recomputed states", lambda r: r["states"]),
            ("gate projections", lambda r: r["projections"]),
            ("ms", lambda r: number(r["ms"])),
            ("host, ms", lambda r: number(r["host_ms"])),
            ("waiting by rank, ms", lambda r: slashed(r["wait_ms_by_rank"])),
        ),
        columns(
            result.data["trace_ms"].items(),
            ("trace", lambda item: item[0]),
            ("exchange by rank, ms", lambda item: slashed(item[1]["exchange by rank"])),
            ("hidden by other kernels, ms", lambda item: slashed(item[1]["beside other kernels"])),
        ),
    ]
    for found in result.data.values():
        if isinstance(found, dict) and "unit" in found:
            lists = [[name, slashed(x)] for name, x in found.items() if name != "unit"]
            tables.append(f"{upper(found['unit'])}.\n\n{table(['case', 'ms'], lists)}")
    return "\n\n".join(tables)
