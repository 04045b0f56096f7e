"""Errors where o is a small difference, by precision and beside FLA's, and what precision="high"
costs.

    python -m benchmarks.precision [--peer fla] [--tokens 4096] [--heads 8] [--out FILE]

Errors are |x - exact| / |exact| of o, the final state and the gradients, against fp64 on the same
bf16 inputs, the case "cancelling" of tests/support/cases.py. "rounding" is what rounding the
operands as the kernels do costs by itself (tests/support/rounded.py). Without a GPU only the
torch stages run.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.members import MEMBERS
from benchmarks.ops import environment, measure
from benchmarks.shapes import SHAPES
from tests.support.cases import PACKED, Case, named
from tests.support.rounded import Rounding, inputs, relative, results, rounded

Named = dict[str, Tensor]


def fla(name: str, x: Named, do: Tensor, keywords: dict) -> Named | str:
    """Results of FLA's operator, or its error message.

    Errors do not depend on tiles, so it uses its first configuration instead of tuning for minutes.
    """
    from triton.runtime.autotuner import Autotuner

    made = Autotuner.__init__

    def first(self, fn, arg_names, configs, *rest, **more):
        made(self, fn, arg_names, (configs or [])[:1], *rest, **more)

    Autotuner.__init__ = first
    try:
        op = getattr(importlib.import_module("fla.ops." + name.removeprefix("chunk_")), name)
        try:
            return results(op, x, do, keywords)
        except Exception as error:  # its backward refuses some versions of Triton
            o, final = op(**x, **keywords, output_final_state=True)[:2]
            print(f"FLA {name}: forward alone: {str(error)[:150]}", flush=True)
            return {"o": o, "final_state": final}
    except Exception as error:
        return str(error)[:200]
    finally:
        Autotuner.__init__ = made


def errors(name: str, case: Case, device: str, peer: str | None) -> dict[str, dict | str]:
    """Errors by implementation."""
    per_head = name != "chunk_kda"
    x, keywords = inputs(case, per_head, device)
    do = torch.randn(case.B, case.T, case.HV, case.V, generator=torch.Generator().manual_seed(2))
    do = do.to(device, torch.bfloat16)
    found: dict[str, Named | str] = {}
    if peer:
        found["FLA"] = fla(name, x, do, keywords)

    import fla_cp

    op = getattr(fla_cp, name)
    wide = {n: t.double() for n, t in x.items()}
    exact = results(op, wide, do, keywords | {"impl": "torch"})
    found["torch stages"] = results(op, x, do, keywords | {"impl": "torch"})
    for precision in ("default", "high"):
        if device == "cuda":
            more = {"impl": "triton", "precision": precision}
            found[f"ours, {precision}"] = results(op, x, do, keywords | more)
        into = do.float(), torch.zeros_like(exact["final_state"])
        r = Rounding(torch.bfloat16, precision == "high", per_head)
        found[f"rounding, {precision}"] = rounded(case, wide, r, into)
    rows: dict[str, dict | str] = {}
    for who, of in found.items():
        known = of if isinstance(of, str) else {n: t for n, t in exact.items() if n in of}
        rows[who] = known if isinstance(known, str) else relative(of, known)  # type: ignore[arg-type]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--shape", choices=SHAPES, default="target", help="what is timed")
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"T": args.tokens, "H": args.heads, "HV": args.heads, "K": args.size, "V": args.size}
    case = named("cancelling", **shape, states=False)
    names = ("chunk_kda", "chunk_gated_delta_rule")
    by_name = {name: errors(name, case, device, args.peer) for name in names}
    report: dict = {**environment(), "case": shape, "errors": by_name, "times": []}
    if device == "cuda":
        import fla_cp

        for member in ("kda", "gdn-layer"):
            op = getattr(fla_cp, MEMBERS[member].ours)
            for precision in ("default", "high", "default", "high"):
                who = f"{member} {precision}"
                row, _ = measure(
                    who, op, MEMBERS[member], SHAPES[args.shape], device, precision=precision
                )
                report["times"].append(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    columns = ("o", "final_state", *(f"d{n}" for n in PACKED), "dA_log", "ddt_bias")
    for name, rows in by_name.items():
        print(f"\n{name:24}" + "".join(f"{n:>12}" for n in columns))
        for who, row in rows.items():
            if isinstance(row, str):
                print(f"{who:24}{row}")
            else:
                cells = (f"{row[n]:12.1e}" if n in row else f"{'':12}" for n in columns)
                print(f"{who:24}" + "".join(cells))
    for row in report["times"]:
        both = ", ".join(f"{w} {row[w]['ms']} ms" for w in ("forward", "both"))
        print(f"{row['op']:24}{both}, peak {row['peak_gib']} GiB")


if __name__ == "__main__":
    main()
