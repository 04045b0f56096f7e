"""Writes docs/performance.md and the tables of README.md from the measured results.

    python -m benchmarks.report [--check]

The results are the files in benchmarks/results/current, one JSON file for each run of a benchmark.
Every table comes from one file and names the hardware, versions, date and commit that the file
recorded. With --check nothing is written: the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import (
    cp_scaling,
    recall,
    report_decays,
    report_memory,
    report_scaling,
    report_steps,
)
from benchmarks import report_tables as tables
from benchmarks.report_tables import MISSING, OPERATORS, Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "current"

README_PERFORMANCE, README_SCALING = "decays-kda", "cp"
"""The results that README shows, by name."""

README_TRAINING = {"340M": "train-fla", "1.3B": "train"} | dict.fromkeys(
    ("kimi-linear-small", "qwen3-next-small"), "train-hybrids"
)
"""The results of training steps that it shows, by model. They may be missing."""

README_SEVERAL_GPUS = "train-2-gpus", "train-4-gpus-selective"
"""The results of training steps on one and on several GPUs that it shows. They may be missing."""

README_TOKENS, README_GPUS = (32768, 131072, 1048576), (1, 2, 4)
README_STEP_TOKENS = 65536


def load(folder: Path = RESULTS) -> list[Result]:
    """All results, in the order of their names."""
    return [Result(p.stem, json.loads(p.read_text())) for p in sorted(folder.glob("*.json"))]


class Section(NamedTuple):
    """A section of docs/performance.md: how to read it, which results it has, how one is shown.

    Without a result, an optional section is left out, and any other says that nothing was measured.
    """

    title: str
    reading: str
    has: Callable[[Result], bool]
    show: Callable[[Result], str]
    command: Callable[[Result], str]
    figure: str = ""
    missing: str = ""
    optional: bool = False


def is_operator(result: Result) -> bool:
    return "operator" in result.data


def has(name: str) -> Callable[[Result], bool]:
    """Results with this key, in the file or in its first row."""
    return lambda result: name in result.data or name in next(iter(result.rows), {})


SECTIONS = (
    Section(
        "Operators and their peers",
        "A ratio is the peer's time divided by ours in the same run, so a ratio above 1 means that "
        "fla_cp is faster. Peak GiB is the most memory that was allocated during forward and "
        "backward.\n\n"
        "Tables of the host's work have these columns; numbers joined by a slash are for the "
        "forward and for both directions:\n\n"
        "- *host*: the time until the call returns.\n"
        "- *launches alone*: the host's time for the kernel launches of the call and nothing else; "
        "*ratio* is *host* divided by *launches alone*.\n"
        "- *launches in autograd*: the same launches, but a backward that does nothing else makes "
        "those of the backward, and the caller waits for it as for ours; *ratio in autograd* is "
        "*host* divided by *launches in autograd*.\n"
        "- *in a chain*: the time of one call, in both directions, if several calls share one "
        "backward, as in a model.\n"
        "- *on one thread*: *host* in both directions if the backward runs on the calling thread "
        "(`torch.autograd.set_multithreading_enabled(False)`). The trainer runs it so.\n"
        "- *in a row*: the host's time for a call if calls follow each other and the host does not "
        "wait for the GPU between them, as in a model; also *on one thread*, and for *launches in "
        "autograd*. *Ratio in a row* is *in a row* divided by *launches in autograd in a row*.\n"
        "- *launches*, *torch ops*, *allocations*, *descriptors*: how many of them a call makes.",
        lambda r: is_operator(r) and tables.peer_of(r) is not None,
        tables.beside_peer,
        tables.operator_command,
        "![Times of KDA and of FLA by shape, from kda-shapes-fla.json](kda-ops.png)",
    ),
    Section(
        "Operators by themselves",
        "The bound is the larger of two times: that of the bytes of inputs and outputs at the "
        "bandwidth of a copy, and that of the products at the rate of a matrix product. The share "
        "of the bound is the bound divided by the measured time. Host is the time until the call "
        "returns. The first call also compiles kernels, unless Triton's cache has them. Numbers "
        "joined by a slash are for the forward and for both directions. [Operators and their "
        "peers](#operators-and-their-peers) explains the tables of the host's work.",
        lambda r: is_operator(r) and tables.peer_of(r) is None,
        tables.alone,
        tables.operator_command,
    ),
    Section(
        "Operators and all peers by decay",
        "The decays are strong, drawn or weak (`DECAYS` of benchmarks/members.py), at T = 32768 "
        "with 32 heads. All implementations were timed in turn, twice, so a cell has two times. "
        "`over fla_cp` is an implementation's time divided by ours. cuDNN's times are those of its "
        "own kernels alone (benchmarks/cudnn_peer.py): its backward leaves out norm, gate and "
        "sigmoid, which ours includes.",
        lambda r: r.data.get("benchmark") == "decays",
        report_decays.tables,
        report_decays.command,
        missing="`python -m benchmarks.decays --op kda --peers fla,cudnn --out "
        "benchmarks/results/current/decays-kda.json`",
    ),
    Section(
        "The operator over several GPUs",
        "One document lies over all GPUs, and a time is that of a forward and a backward on the "
        "slowest rank. Efficiency is one GPU's time for one GPU's share of the tokens, divided by "
        "the measured time. Host, where it was measured, is the time until the call returns, "
        "exchanges included, in the forward / in both directions. MiB received follows from the "
        "table in [design.md](design.md#exchange). With *symmetric* on more than two GPUs a rank "
        "receives less, 4 MiB, because one kernel passes the state on (in files since 2026-11-24).",
        has("kind"),
        lambda r: report_scaling.scaling(r, "operator"),
        report_scaling.scaling_command,
        "![Time over GPUs and its ideal, from cp.json](cp-scaling.png)",
    ),
    Section(
        "A layer over several GPUs",
        "This is the same run with one whole KDA layer of hidden size 4096 in place of the "
        "operator. Over several ranks, the host calls each module of a layer by itself. In files "
        "until 2026-11-27 it does so on one GPU, too, because the decay rates were in bf16; "
        "[host time of a layer](#host-time-of-a-layer) shows a layer that is one call.",
        has("kind"),
        lambda r: report_scaling.scaling(r, "layer"),
        report_scaling.scaling_command,
    ),
    Section(
        "Softmax attention on one GPU",
        "The peer is PyTorch's own call for packed documents, "
        "`torch.nn.attention.varlen.varlen_attn`, which runs FlashAttention-2. fla_cp calls cuDNN "
        "for long documents. A ratio is the peer's time divided by ours in the same run.",
        lambda r: r.data.get("benchmark") == "attention",
        tables.attention,
        tables.attention_command,
    ),
    Section(
        "Hybrid layers over several GPUs",
        "A step is the forward and backward of four blocks of the trainer, three recurrent ones "
        "and one of softmax attention, on one document over all GPUs. The gradients of parameters "
        "are not summed over GPUs. A ratio is one GPU's time divided by the measured time. Balance "
        "is the slowest rank's time divided by the mean over the ranks, both without waits.",
        lambda r: r.data.get("benchmark") == "hybrid",
        report_steps.hybrid,
        report_steps.hybrid_command,
        missing="`python -m benchmarks.hybrid --ranks 1,2 --out "
        "benchmarks/results/current/hybrid.json`",
    ),
    Section(
        "Host time of a layer",
        "A whole layer of hidden size 2304 with 18 heads runs on one GPU. The table shows how long "
        "the host needs to issue it, and how many calls of torch's operators, kernels and autograd "
        "nodes that takes. Numbers joined by a slash are for the forward and for both directions.",
        lambda r: r.data.get("benchmark") == "layer_host",
        tables.layer_host,
        tables.layer_host_command,
    ),
    Section(
        "Training steps",
        "A step is one of the trainer on one sequence over all GPUs, batch and optimiser included, "
        "beside a step of FLA's own model class with the same sizes. MFU compares the operations "
        "that the model needs (`fla_cp/train/flops.py`) with 989 TFLOP/s a GPU. A ratio is our "
        "tokens/s divided by FLA's.",
        lambda r: r.data.get("benchmark") == "train",
        report_steps.training_steps,
        report_steps.steps_command,
        "![Tokens/s over GPUs, and the time of a step by kind of kernel](train-steps.png)",
        missing="`python -m benchmarks.train --peer fla --profile --out "
        "benchmarks/results/current/train.json`",
    ),
    Section(
        "Activation checkpoints and offload",
        "A time is that of the forward and backward of a decoder's blocks on one GPU, with each "
        "`--remat` of the trainer and with activations offloaded to the host. `full, not kept` is "
        "what full would be if the recomputed operator did not keep its intermediates. The memory "
        "that is kept for the backward does not include weights and input.",
        lambda r: r.data.get("benchmark") == "remat",
        report_memory.remat,
        report_memory.remat_command,
        optional=True,
    ),
    Section(
        "A model of transformers",
        "The steps are those of "
        "[examples/transformers_hybrid.py](../examples/transformers_hybrid.py), or of the script "
        "that the command names. The model is a Qwen3.5 of 4B's shape with random weights, unless "
        "the command has another shape. One sequence of two documents lies over all GPUs, blocks "
        "are recomputed, and the optimiser is included. Tokens/s is the median of the steps after "
        "the first, which compiles kernels.",
        lambda r: r.data.get("benchmark") == "example",
        report_memory.example,
        report_memory.example_command,
        optional=True,
    ),
    Section(
        "Decoding",
        "A step decodes one more token for each of B sequences, with a whole decoder that has "
        "random weights. The floor is the time in which the device reads the weights once, and "
        "reads and writes the states once, at the larger of the two bandwidths above the table; "
        "*over reads* is the time over that of the reads alone. With 2 to 64 rows, a step writes a "
        "quarter of the states (kernels/sm90/rows_deferred.py). "
        "The goals for 1.3B are 1.5 times the floor at B = 1 and 1.3 times at B = 64. The columns "
        "of times are:\n\n"
        "- *graph*: a step in a CUDA graph, as it runs by default. Recurrent layers that follow "
        "each other run in one kernel or, with many rows, in those of "
        "kernels/sm90/rows_run.py.\n"
        "- *kernels*: a graph in which each layer runs in several other kernels.\n"
        "- *separate*, *stages*, *late*: *kernels* with one change. In *separate*, every product "
        "is a call of cuBLAS. In *stages*, convolution, recurrence and gated norm are kernels of "
        "their own. In *late*, no kernel starts before the one ahead of it has ended "
        "(kernels/triton/early.py).\n"
        "- *loop*: the wall-clock time of a step of *graph*, while the host reads each token. "
        "*eager loop* is the same without a graph.",
        lambda r: r.data.get("benchmark") == "decode",
        report_memory.decode,
        report_memory.decode_command,
        missing="`python -m benchmarks.decode --out benchmarks/results/current/decode.json`",
    ),
    Section(
        "Runs of the trainer",
        "Each row is one run of the trainer with a model of 1.3 billion parameters in bf16. The "
        "first steps of a run compile kernels.",
        lambda r: "cp" in next(iter(r.rows), {}),
        report_scaling.training,
        lambda r: f"`{r.data['command']}`",
    ),
    Section(
        "First calls",
        "Each operator runs forward and backward in three processes, for each T in turn: one with "
        "an empty Triton cache, in which kernels compile one by one; one with an empty cache, in "
        "which they compile side by side; and one with the cache that the second process left.",
        has("calls"),
        tables.first_calls,
        tables.first_calls_command,
        missing="`python -m benchmarks.first_call`",
    ),
    Section(
        "New packings",
        "The calls are on packed documents, forward and backward. Either each call has a packing "
        "that was never seen before, or some of these packings come again. A ratio is the time of "
        "the former divided by that of the latter.",
        lambda r: r.data.get("benchmark") == "packings",
        tables.packings,
        tables.packings_command,
        missing="`python -m benchmarks.host --packings`",
    ),
    Section(
        "Exchange of states",
        "The table has the microseconds of one exchange and of its parts on each rank. `graph` is "
        "the same exchange replayed by a CUDA graph, without launches from Python.",
        has("all_gather alone"),
        report_scaling.exchange,
        report_scaling.exchange_command,
    ),
    Section(
        "Exchanges and other work at the same time",
        "The last column is how long the compute stream of each rank waits for exchanges.",
        has("trace_ms"),
        report_scaling.overlap,
        lambda r: "",
        "![Kernels of a layer on two GPUs, by stream](timeline.png)",
    ),
    Section(
        "Operators bound by memory",
        "Each operator is compared with a device copy of as many bytes as it must move.",
        has("over_copy"),
        tables.bandwidth,
        tables.bandwidth_command,
    ),
    Section(
        "Errors where the output is a small difference",
        "The keys are nearly parallel. An error is the norm of the difference to fp64, divided by "
        "the norm of the exact tensor; `rounding` is the error that rounding the operands causes "
        "by itself.",
        lambda r: "errors" in r.data,
        tables.precision,
        tables.precision_command,
    ),
    Section(
        "Recall of a needle",
        "The table has the share of needles that a tiny model recalls after a minute of training "
        "on a CPU, by length of the document and depth of the needle; see "
        "[evaluation](evaluation.md).",
        lambda r: "training" in r.data,
        recall.table,
        lambda r: f"`python -m benchmarks.recall --out {r.path}`",
    ),
    Section(
        "Comparing ranks",
        "The times are medians of what building and using a context costs, with and without the "
        "comparison of the ranks' tables.",
        has("us"),
        tables.agreement,
        tables.agreement_command,
    ),
    Section(
        "Checkpoints",
        "`blocking` is a checkpoint that the step waits for. `paused` is what a checkpoint that is "
        "written in the background costs the step.",
        has("seconds"),
        tables.checkpoint,
        tables.checkpoint_command,
        missing="`torchrun --nproc-per-node 2 -m benchmarks.checkpoint --ranks 2 --size 1.3B`",
    ),
)

PAGE = """\
# Performance

`python -m benchmarks.report` writes this page from the files in benchmarks/results/current; do not
edit it by hand. Each table shows one file and names its GPU, versions, date and commit. Inputs are
bf16, with K = V = 128, unless a table says otherwise. Compare numbers only within one table:
clocks, hosts and kernels differ between runs. "Command" is how today's programs write the same kind
of file. "Unit" says what the numbers are; names in it, such as `host_ms`, are those of the file.
[log.md](log.md) tells what was tried and what each result taught; it also names older results,
which are in benchmarks/results/archive.
"""

MODEL = """\
## Modelled exchanges

The table has the microseconds of one exchange, in one direction of one layer, for HV = 32,
K = V = 128 and hosts of eight GPUs. They come from a model and were not measured.
`benchmarks/cp_scaling.py` has the latencies and bandwidths of the model: those within a host come
from measurements, those between hosts are assumed.
Command: `python -m benchmarks.cp_scaling --model`.

"""


def performance_page(results: list[Result]) -> str:
    """docs/performance.md. Raises ValueError for a result that no section shows."""
    shown = {r.name for s in SECTIONS for r in results if s.has(r)}
    if unknown := sorted({r.name for r in results} - shown):
        raise ValueError(f"benchmarks.report shows no table of {', '.join(unknown)}")
    parts = [PAGE]
    for section in SECTIONS:
        found = [r for r in results if section.has(r)]
        if section.optional and not found:
            continue
        parts.append(f"## {section.title}\n\n{section.reading}\n")
        if not found:
            command = f" Command: {section.missing}." if section.missing else ""
            parts.append(f"{MISSING.capitalize()}: there is no result file.{command}\n")
        for r in found:
            title = r.name
            if is_operator(r):
                title = f"{OPERATORS[r.data['operator']]} ({r.name})"
            about = tables.described(r, section.command(r))
            parts.append(f"### {title}\n\n{about}\n\n{section.show(r)}\n")
        if found and section.figure:
            parts.append(section.figure + "\n")
    parts.append(MODEL + cp_scaling.model_table() + "\n")
    return "\n".join(parts)


def readme_scaling(result: Result) -> str:
    """README's table of the operator and a layer over several GPUs."""
    strong = [r for r in result.rows if r["kind"] == "strong" and r["scheme"] == "auto"]

    def cell(op: str, T: int, gpus: int) -> str:
        wanted = {"op": op, "T": T, "ranks": gpus}
        row = next((r for r in strong if wanted.items() <= r.items()), None)
        gain = report_scaling.speed_up(strong, row) if gpus > 1 else None
        return report_scaling.step_time(row) + ("" if gain is None else f" ({tables.ratio(gain)})")

    rows = [
        [str(T), *[cell(op, T, n) for op in ("operator", "layer") for n in README_GPUS]]
        for T in README_TOKENS
    ]
    counts = [f"{n} GPU{'s' * (n > 1)}" for n in README_GPUS]
    head = ["tokens", *[f"{op}, {n}" for op in ("operator", "layer") for n in counts]]
    return f"{tables.table(head, rows)}\n\n{tables.source(result)}"


def readme_training(results: Mapping[str, Result]) -> str:
    """README's table of training steps. results: by name."""
    found = {model: results.get(name) for model, name in README_TRAINING.items()}
    several = [results[name] for name in README_SEVERAL_GPUS if name in results]
    return report_steps.readme_steps(found, README_STEP_TOKENS, several)


def between(text: str, name: str, new: str) -> str:
    """`text` with `new` between the markers <!-- name --> and <!-- /name -->."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"README.md must have {first} and {last} once each")
    before, rest = text.split(first)
    return f"{before}{first}\n{new}\n{last}{rest.split(last)[1]}"


def pages(results: list[Result], root: Path) -> dict[Path, str]:
    """What each page below `root` should hold."""
    by_name = {r.name: r for r in results}
    readme = (root / "README.md").read_text()
    readme = between(readme, "performance", report_decays.readme(by_name[README_PERFORMANCE]))
    readme = between(readme, "scaling", readme_scaling(by_name[README_SCALING]))
    readme = between(readme, "training", readme_training(by_name))
    return {root / "docs" / "performance.md": performance_page(results), root / "README.md": readme}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    args = parser.parse_args()
    stale = [
        (path, text)
        for path, text in pages(load(), ROOT).items()
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        name = path.relative_to(ROOT)
        if args.check:
            print(f"{name} is out of date: run python -m benchmarks.report")
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
