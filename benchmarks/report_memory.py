"""Tables of `benchmarks.remat`, `benchmarks.example_figures` and `benchmarks.decode` for
benchmarks/report.py."""

from __future__ import annotations

from benchmarks.report_tables import Result, columns, joined, module, number, ratio, whole

EXAMPLE = "transformers_hybrid.py"
"""The script of results that name none, and the default of `benchmarks.example_figures`."""


def remat_command(result: Result) -> str:
    data = result.data
    sizes = (f"--{name} {data[name]}" for name in ("size", "layers", "tokens"))
    return module("remat", result, *sizes, f"--gate-lower-bound {data['gate_lower_bound']}")


def remat(result: Result) -> str:
    none = next(r["ms"] for r in result.rows if r["mode"] == "none")
    return columns(
        result.rows,
        ("`--remat`", lambda r: r["mode"]),
        ("forward + backward, ms", lambda r: number(r["ms"])),
        ("over none", lambda r: ratio(r["ms"] / none)),
        ("host, ms", lambda r: number(r["host_ms"])),
        ("kept for the backward, GiB", lambda r: number(r["kept_gib"])),
        ("peak GiB", lambda r: number(r["peak_gib"])),
    )


def example_command(result: Result) -> str:
    rows, script = result.rows, result.data.get("script", EXAMPLE)
    flags = [] if script == EXAMPLE else [f"--script {script}"]
    flags += [f"--gpus {joined(r['gpus'] for r in rows)}"]
    flags += [f"--tokens {joined(r['tokens'] for r in rows)}"]
    flags += [f"--steps {max(r['steps'] for r in rows)}"]
    flags += [f'--shape "{result.data["shape"]}"'] if result.data["shape"] else []
    return module("example_figures", result, *flags)


def example(result: Result) -> str:
    return columns(
        result.rows,
        ("tokens", lambda r: str(r["tokens"])),
        ("GPUs", lambda r: str(r["gpus"])),
        ("tokens/s", lambda r: r.get("error") or whole(r.get("tokens_per_second"))),
        ("first step, s", lambda r: number(r.get("first_step_s"))),
        ("peak GiB", lambda r: number(r.get("peak_gib"))),
        ("start to end, s", lambda r: number(r.get("wall_s"))),
    )


def decode_command(result: Result) -> str:
    data, batches = result.data, joined(r["batch"] for r in result.rows)
    size = f"--size {data['size']} --pattern {data['pattern']}"
    return module("decode", result, size, f"--batches {batches}")


def decode(result: Result) -> str:
    rates = result.data["gb_s"]
    said = f"Bandwidth: {whole(rates['copy'])} GB/s of a copy, {whole(rates['read'])} of a sum."
    return f"{said}\n\n" + columns(
        result.rows,
        ("B", lambda r: str(r["batch"])),
        ("GB", lambda r: number(r["gb"])),
        ("floor, ms", lambda r: number(r["floor_ms"])),
        ("graph, ms", lambda r: number(r["graph_ms"])),
        ("over floor", lambda r: ratio(r["over_floor"])),
        ("over reads", lambda r: ratio(r.get("over_reads"))),
        (
            "kernels, ms",
            lambda r: number(r.get("kernels_ms")),
        ),  # since there is a kernel for layers
        ("separate, ms", lambda r: number(r["separate_ms"])),
        ("stages, ms", lambda r: number(r["stages_ms"])),
        ("late, ms", lambda r: number(r["late_ms"])),
        ("launches", lambda r: whole(r["launches"])),
        ("loop, ms", lambda r: number(r["loop_ms"])),
        ("eager loop, ms", lambda r: number(r["eager_loop_ms"])),
        ("tokens/s", lambda r: whole(r["tokens_per_second"])),
    )
