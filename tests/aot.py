"""Compiling the kernels for sm_90 without a GPU, exactly as the package would launch them.

`python -m tests.aot` compiles every kernel and tile configuration. It fails on an error, over the
shared memory of a block, on spills, on instructions that read what nothing wrote,
and where registers, spills or shared memory differ from those kept in aot.json for this Triton
(`--write` keeps new ones).

Inside `compiled()`, Triton targets sm_90 and every launch compiles its kernel and returns, so an
operator called on CPU tensors goes through the package's own launch code; the numbers it returns
mean nothing. Each compiled kernel is recorded with its registers, spills and shared memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SM90_SHARED = 227 * 1024
"""Bytes of shared memory that one block may use."""


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel. spills: bytes a thread. shared: bytes of a block. undefined:
    instructions that read what nothing wrote."""

    kernel: str
    registers: int
    spills: int
    shared: int
    undefined: tuple[str, ...]


class _Sm90:
    """Stands in for the CUDA driver: names a target and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> object:
        return torch.cuda

    def get_benchmarker(self) -> object:
        return lambda fn, *args, **kwargs: [1.0, 1.0, 1.0]

    @classmethod
    def is_active(cls) -> bool:
        return True


_READ: dict[str, Compiled] = {}
"""By hash of the compiled kernel: the assembler takes seconds to say it again."""


@contextmanager
def compiled() -> Iterator[list[Compiled]]:
    """Records what each launch in the block compiles to."""
    results: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in _READ:
            _READ[kernel.hash] = resources(kernel)
        results.append(_READ[kernel.hash])
        return kernel

    from fla_cp.kernels import hopper
    from fla_cp.kernels import launch as launches
    from fla_cp.kernels.backend import TRITON
    from fla_cp.ops import conv, kda, member

    resolve = kda.resolve  # would refuse tensors on the CPU
    for module in (conv, kda, member):
        module.resolve = lambda *args: TRITON
    least, hopper.LEAST = hopper.LEAST, 0
    launches.remembers = False
    active = driver._active  # the property would look for a GPU
    driver.set_active(_Sm90())
    JITFunction.run = compile_only
    try:
        yield results
    finally:
        JITFunction.run = run
        hopper.LEAST = least
        launches.remembers = True
        driver._active = active
        for module in (conv, kda, member):
            module.resolve = resolve


def resources(kernel) -> Compiled:
    """Registers, spills and shared memory of a compiled kernel, and what is miscompiled in it."""
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", target, file.name]
        log = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=kernel.metadata.shared,
        undefined=tuple(undefined(sass)),
    )


def undefined(sass: str) -> list[str]:
    """Instructions that read a uniform register which no earlier one wrote, or that compute with
    the stack pointer R1 as if it held data: how ptxas 12.8 miscompiles wgmma descriptors."""
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        m = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", line)
        if m is None:
            continue
        op, operands = m.groups()
        first, _, rest = operands.partition(",")
        to = re.fullmatch(r"UR(\d+)", first.strip())
        read = {int(n) for n in re.findall(r"\bUR(\d+)\b", rest if to else operands)}
        if op.startswith("HGMMA"):  # the second half of the four holds B; A may be in registers
            read = {n + half for n in read for half in (2, 3)}
        carried = re.search(r"P\d, R1\b", operands) or (
            op == "IADD3.X" and re.search(r"\bR1\b", rest)
        )
        if read - written or carried:
            found.append(m[0])
        if to:
            wide = 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
            written |= {int(to[1]) + n for n in range(wide)}
    return found


INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
SAFE = {"safe_gate": True, "lower_bound": -5.0}
SIZES = ((16, 16), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RECORD = Path(__file__).parent / "aot.json"


def compile_call(K: int, V: int, dtype: torch.dtype, gate: dict) -> list[Compiled]:
    """Every kernel of one forward and backward of a sequence in three segments, each once."""
    from fla_cp import chunk_kda
    from fla_cp.kernels.measure import cut_into

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    packed = [leaf(1, 192, 2, K), leaf(1, 192, 2, K), leaf(1, 192, 2, V), leaf(1, 192, 2, K)]
    rates = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * K)}
    rates = {n: t.requires_grad_() for n, t in rates.items()}
    with cut_into(1), compiled() as kernels:
        o, _ = chunk_kda(*packed, leaf(1, 192, 2), **rates, **INSIDE, **gate, impl="triton")
        o.float().sum().backward()
    return [k for k in dict.fromkeys(kernels) if "walk" not in k.kernel]


def compile_member(
    name: str, K: int, V: int, dtype: torch.dtype, gate: dict, H: int = 1
) -> list[Compiled]:
    """Kernels of a member of the family with two value heads, forward and backward of a sequence in
    three segments."""
    import fla_cp
    from fla_cp.kernels.measure import cut_into

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    channels = (K,) if name == "gla" else ()
    x = [leaf(1, 192, H, K), leaf(1, 192, H, K), leaf(1, 192, 2, V)]
    x += [leaf(1, 192, H, K)] if name == "comba" else []
    x.append(leaf(1, 192, 2, *channels))
    inside = dict(INSIDE)
    if "gla" in name:
        del inside["use_beta_sigmoid_in_kernel"]
    else:
        x.append(leaf(1, 192, 2))
    rates = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * (K if channels else 1))}
    rates = {n: t.requires_grad_() for n, t in rates.items()}
    with cut_into(1), compiled() as kernels:
        o, _ = getattr(fla_cp, f"chunk_{name}")(*x, **rates, **inside, **gate, impl="triton")
        o.float().sum().backward()
    return [k for k in dict.fromkeys(kernels) if "walk" not in k.kernel]


def compile_recurrent(K: int, V: int, dtype: torch.dtype, v_first: bool) -> list[Compiled]:
    """A decoding step of a layer."""
    from fla_cp import fused_recurrent_kda

    x = [torch.zeros(4, 1, h, d, dtype=dtype) for h, d in ((1, K), (1, K), (2, V), (2, K))]
    state = torch.zeros(4, 2, *((V, K) if v_first else (K, V)))
    with compiled() as kernels:
        fused_recurrent_kda(
            *x,
            torch.zeros(4, 1, 2, dtype=dtype),
            A_log=torch.zeros(2),
            dt_bias=torch.zeros(2 * K),
            initial_state=state,
            inplace_final_state=True,
            state_v_first=v_first,
            **INSIDE,
            impl="triton",
        )
    return list(dict.fromkeys(kernels))


def compile_conv(dtype: torch.dtype, halo: bool) -> list[Compiled]:
    """Forward and backward with four taps, SiLU and a bias; with a halo as under a context."""
    from fla_cp.kernels.conv import conv, conv_bwd
    from fla_cp.stages.conv import ConvRows

    x, weight, bias = (torch.zeros(*s, dtype=dtype) for s in ((256, 1000), (1000, 4), (1000,)))
    where = ConvRows.build(torch.zeros(256), (256,), 3 * halo, x.device)
    front = x.new_empty(len(where.halo), 1000)
    with compiled() as kernels:
        y = conv(x, front, where, weight, bias, True)
        conv_bwd(x, front, where, weight, bias, True, y)
    return list(dict.fromkeys(kernels))


def compile_gate(dtype: torch.dtype, lower_bound: float | None) -> list[Compiled]:
    from fla_cp import kda_gate

    g, A_log, dt_bias = (
        torch.zeros(*s, requires_grad=True) for s in ((256, 2, 128), (2,), (2 * 128,))
    )
    with compiled() as kernels:
        kda_gate(
            g.to(dtype), A_log, dt_bias, lower_bound=lower_bound, impl="triton"
        ).sum().backward()
    return list(dict.fromkeys(kernels))


def compile_walk(K: int, V: int) -> list[Compiled]:
    """A fold with states that enter, in reverse, of transitions alone, and of what ranks sent."""
    from fla_cp.affine import Walk
    from fla_cp.kernels.walk import walk
    from fla_cp.packing import Packing

    steps = Walk((0, 1), (0,), (0,), (0,), (0,), (1,))
    packing, (M, B) = Packing.build((0, 64)), (torch.zeros(2, 2, K, n) for n in (K, V))
    with compiled() as kernels:
        for transposed in (False, True):
            walk(packing, steps, M, B, B, B, transposed=transposed)
            walk(packing, steps, M, B, None, B, transposed=transposed)
        walk(packing, steps, M, None, M, M, transposed=False)
        wire = torch.zeros(2, 2, K, V + K)
        walk(packing, steps, wire[..., V:], wire[..., :V], None, B, transposed=False)
    return list(dict.fromkeys(kernels))


def configurations() -> Iterator[tuple[str, Callable[[], list[Compiled]]]]:
    """What is compiled, by name: each size and dtype with the tiles that the table gives, and each
    candidate tile at K = V = 128."""
    from fla_cp.kernels import tuning
    from fla_cp.kernels.measure import GROUPED, forced

    for (K, V), (name, dtype) in product(SIZES, DTYPES.items()):
        for gate, options in (("safe", SAFE), ("any", {})):
            if gate == "any" or name == "bf16":  # only bf16 has a path of its own for a safe gate
                call = functools.partial(compile_call, K, V, dtype, options)
                yield f"{K}x{V} {name} {gate}", call

        call = functools.partial(compile_member, "gated_delta_rule", K, V, dtype, {})
        yield f"{K}x{V} {name} head groups", call
        call = functools.partial(compile_member, "gated_delta_rule", K, V, dtype, {}, H=2)
        yield f"{K}x{V} {name} head", call
        for layout in ("KV", "VK"):
            call = functools.partial(compile_recurrent, K, V, dtype, layout == "VK")
            yield f"recurrent {K}x{V} {name} {layout}", call
    for name, dtype in DTYPES.items():
        for member in ("comba", "gla", "simple_gla"):
            call = functools.partial(compile_member, member, 128, 128, dtype, {})
            yield f"{member} {name} any", call
        call = functools.partial(compile_member, "comba", 128, 128, dtype, {}, H=2)
        yield f"comba {name} head", call
    call = functools.partial(compile_member, "gla", 128, 128, torch.bfloat16, SAFE)
    yield "gla bf16 safe", call
    for K, V in SIZES:
        yield f"walk {K}x{V}", functools.partial(compile_walk, K, V)
    for name, dtype in DTYPES.items():
        for halo in (False, True):
            call = functools.partial(compile_conv, dtype, halo)
            yield f"conv {name}{' halo' * halo}", call
        for bound in (None, -5.0):
            call = functools.partial(compile_gate, dtype, bound)
            yield f"gate {name} {'softplus' if bound is None else 'sigmoid'}", call

    def with_tile(stage: str, tile: tuning.Tile) -> list[Compiled]:
        options = {} if stage.endswith("_any") else SAFE
        of_heads = "head" in stage or stage.endswith("_beside")
        kernels = []
        with forced({stage.removesuffix("_beside"): tile}):
            if of_heads:
                H = 1 if stage in GROUPED else 2
                kernels += compile_member("gated_delta_rule", 128, 128, torch.bfloat16, {}, H=H)
            if "head" not in stage:
                kernels += compile_call(128, 128, torch.bfloat16, options)
        name = stage.removesuffix("_beside").removesuffix("_any")
        name = name.removesuffix("_states").removesuffix("_ends")
        name = "scores_head_bwd" if name == "scores_bwd_head" else name
        name += "_hopper" * tile.hopper
        return [k for k in kernels if k.kernel == f"{name}_kernel"]

    for stage in sorted({stage for _, stage, *_ in tuning.TABLE}):
        for tile in tuning.candidates(stage, 128, 128):
            yield f"{stage} {tuple(tile)}", functools.partial(with_tile, stage, tile)


def check(name: str, kernels: list[Compiled]) -> list[str]:
    """What is wrong with the kernels of one configuration."""
    return [
        f"{name}: {k.kernel}: {problem}"
        for k in kernels
        for problem in (
            f"{k.shared} bytes of shared memory" if k.shared > SM90_SHARED else "",
            f"reads what nothing wrote: {k.undefined[0]}" if k.undefined else "",
            f"spills {k.spills} bytes" if k.spills else "",
        )
        if problem
    ]


def record(name: str, kernels: list[Compiled]) -> dict[str, list[list[int]]]:
    """{configuration: {kernel: [[registers, spills, shared], ..]}} as kept in aot.json."""
    rows: dict[str, list[list[int]]] = {}
    for k in kernels:
        rows.setdefault(k.kernel, []).append([k.registers, k.spills, k.shared])
    return rows


def changes(kept: dict, now: dict) -> list[str]:
    """Lines of a diff of two records."""
    lines = []
    for name in sorted(kept.keys() | now.keys()):
        if kept.get(name) != now.get(name):
            lines += [f"- {name}: {kept.get(name)}", f"+ {name}: {now.get(name)}"]
    return lines


def compile_share(part: int, parts: int) -> tuple[dict, list[str]]:
    """Record and problems of every parts-th configuration from `part` on."""
    rows, problems = {}, []
    for name, call in list(configurations())[part::parts]:
        kernels = call()
        rows[name] = record(name, kernels)
        problems += check(name, kernels)
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows, problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what is compiled in aot.json")
    parser.add_argument("--part", type=int, nargs=2, metavar=("N", "OF"), help="print one share")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(compile_share(*args.part)))
        return 0
    parts = min(8, os.cpu_count() or 1)
    command = [sys.executable, "-m", "tests.aot", "--part"]
    children = [
        subprocess.Popen([*command, str(n), str(parts)], stdout=subprocess.PIPE, text=True)
        for n in range(parts)
    ]
    rows: dict = {}
    problems: list[str] = []
    for child in children:
        out, _ = child.communicate()
        if child.returncode:
            return 1  # its error is on stderr
        share, wrong = json.loads(out)
        rows |= share
        problems += wrong
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key = f"triton {triton.__version__}"
    if args.write:
        kept[key] = dict(sorted(rows.items()))
        lines = (
            f" {json.dumps(v)}: {{\n"
            + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in kept[v].items())
            + "\n }"
            for v in sorted(kept)
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif key in kept:
        problems += changes(kept[key], rows)
    print("\n".join(problems))
    print(f"{len(rows)} configurations compiled with {key}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
