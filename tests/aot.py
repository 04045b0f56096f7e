"""Compiling the kernels for sm_90 without a GPU, exactly as the package would launch them.

`python -m tests.aot` compiles every kernel and tile configuration. It fails on an error, over the
shared memory of a block, on spills, on instructions that read what nothing wrote, on pipelines that
copy over what products still read, and where registers, spills or shared memory differ from those
kept in aot.json for this Triton (`--write` keeps new ones).

Inside `launched()`, Triton targets sm_90 and a launch only keeps what Triton would compile for it,
so an operator called on CPU tensors goes through the package's own launch code; the numbers it
returns mean nothing. What all configurations launch is then compiled, each kernel once, by a few
processes.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from tests.gpu import kernel_hashes
from tests.support.tuned import variant

SM90_SHARED = 227 * 1024
"""Bytes of shared memory that one block may use."""


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel. spills: bytes a thread. shared: bytes of a block. undefined:
    instructions that read what nothing wrote. serial: what ptxas says of asynchronous products
    that it made wait. overwritten: operands of a pipelined loop (`overwritten`)."""

    kernel: str
    registers: int
    spills: int
    shared: int
    undefined: tuple[str, ...]
    serial: tuple[str, ...]
    overwritten: tuple[str, ...]


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


@dataclass(frozen=True)
class Launch:
    """A kernel by name, and what Triton compiles for this launch of it: a key of `_LATER.calls`."""

    kernel: str
    key: str


class _Later:
    """Stands in for Triton's AsyncCompileMode: keeps what is to be compiled, by key."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[], CompiledKernel]] = {}

    def submit(self, key: str, compile_fn: Callable[[], CompiledKernel], finalize_fn: Any) -> str:
        self.calls.setdefault(key, compile_fn)
        return key


_LATER = _Later()


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """Records the launches in the block; nothing is compiled."""
    results: list[Launch] = []
    run = JITFunction.run

    def keep(self, *args, grid, warmup, **kwargs):
        key = run(self, *args, grid=grid, warmup=True, **kwargs)
        results.append(Launch(self.__name__, key))

    from fla_cp.kernels import using
    from fla_cp.kernels.triton import launch as launches

    backend = variant(min_chunk_heads=0)
    launches.runner = lambda kernel, grid, *given, **named: kernel[grid](*given, **named)
    active = driver._active  # the property would look for a GPU
    driver.set_active(_Sm90())
    JITFunction.run = keep
    before = active_mode.set(_LATER)
    try:  # tensors are on the CPU, where "auto" means torch
        with using(backend), using(replace(backend, name="torch")):
            yield results
    finally:
        active_mode.reset(before)
        JITFunction.run = run
        launches.runner = None
        driver._active = active


def start_worker() -> None:
    driver.set_active(_Sm90())
    triton.knobs.nvidia.dump_ptxas_log = True


def compile_one(where: str, key: str) -> tuple[CompiledKernel, str]:
    """The kernel, and what ptxas said of it."""
    try:
        with redirect_stdout(io.StringIO()) as log:
            kernel = _LATER.calls[key]()
            if "registers" not in log.getvalue():  # from Triton's cache
                data, target = kernel.metadata, kernel.metadata.target
                make_backend(target).make_cubin(kernel.asm["ptx"], {}, data, target.arch)
        return kernel, log.getvalue()
    except Exception:  # Triton's own do not all survive pickling
        raise RuntimeError(f"{where}\n{traceback.format_exc()}") from None


def compile_together(named: list[tuple[str, str]]) -> list[Compiled]:
    """Compiles what (configuration, key) pairs name, in a worker."""
    pairs = [compile_one(*pair) for pair in named]
    sass = disassembled([machine_code(kernel.asm["cubin"]) for kernel, _ in pairs])
    return [resources(*pair, code) for pair, code in zip(pairs, sass, strict=True)]


def resources(kernel: CompiledKernel, log: str, sass: str) -> Compiled:
    """Registers, spills and shared memory of a compiled kernel, and what is miscompiled in it."""
    return Compiled(
        kernel=kernel.metadata.name,
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared=kernel.metadata.shared,
        undefined=tuple(undefined(sass)),
        serial=tuple(re.findall(r"\(C75\d\d\).*", log)),
        overwritten=tuple(overwritten(kernel.asm["ttgir"])),
    )


def overwritten(ttgir: str) -> list[str]:
    """Operands in shared memory that a loop copies anew while asynchronous products still read
    them: Triton (3.6.0, 3.7.1) gives a load that products and other instructions use one buffer too
    few, and lets the products run on. What lands at once (zeros of rows and tiles beyond the end,
    data from a cache) is then multiplied in the place of what was there."""
    of: dict[str, str] = {}
    buffers: dict[str, int] = {}
    before: dict[str, int] = {}
    loops: list[int] = []
    reading: set[str] = set()
    found: set[str] = set()
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        while loops and depth <= loops[-1]:
            loops.pop()
        name = re.match(r"\s*%(\S+?)(?::\d+)? = ", line)
        if m := re.search(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", line):
            of[name[1]], buffers[name[1]] = name[1], int(m[1])
        elif m := re.search(r"= ttg\.memdesc_\w+ %([\w#]+)", line):
            of[name[1]] = of.get(m[1], m[1])
        elif "scf.for" in line:
            loops.append(depth)
            reading = set()
        elif m := re.search(r"async_copy_global_to_local %\S+, %([\w#]+)", line):
            to = of.get(m[1], m[1])
            if not loops:
                before[to] = before.get(to, 0) + 1
            elif to in reading and before.get(to, 0) >= buffers.get(to, 0):
                found.add(to)
        elif "ttng.warp_group_dot " in line and "isAsync = true" in line:
            operands = re.findall(r"%([\w#]+)", line.split("warp_group_dot ")[1].split("{")[0])
            reading |= {of[x] for x in operands[:2] if x in of}
        elif "warp_group_dot_wait" in line and "pendings = 0" in line:
            reading = set()
    return sorted(found)


def machine_code(cubin: bytes) -> bytes:
    """The executable sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = (struct.unpack_from("<4Q", cubin, table + n * size + 8) for n in range(count))
    return b"".join(cubin[at : at + length] for flags, _, at, length in sections if flags & 4)


def disassembled(codes: list[bytes]) -> list[str]:
    """Each machine code in words. Together, because nvdisasm takes half a second to start."""
    with tempfile.NamedTemporaryFile("wb", suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-ndf", "-b", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/(.*)", text, re.MULTILINE)
    if 16 * len(words) != sum(map(len, codes)) or not all(codes):
        raise ValueError(f"nvdisasm: {len(words)} instructions in {[*map(len, codes)]} bytes")
    rest = iter(words)
    return [
        "\n".join(f"/*{at:04x}*/{next(rest)}" for at in range(0, len(code), 16)) for code in codes
    ]


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
HIGH = {"precision": "high"}
SIZES = ((16, 16), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RECORD = Path(__file__).parent / "aot.json"
TOGETHER = 8
"""Kernels that a worker compiles before it disassembles them."""


def compile_call(K: int, V: int, dtype: torch.dtype, gate: dict) -> list[Launch]:
    """Every kernel of one forward and backward of a sequence in three segments, each once."""
    from benchmarks.tune import cut_into
    from fla_cp import chunk_kda

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    packed = [leaf(1, 192, 2, K), leaf(1, 192, 2, K), leaf(1, 192, 2, V), leaf(1, 192, 2, K)]
    rates = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * K)}
    rates = {n: t.requires_grad_() for n, t in rates.items()}
    with cut_into(1), launched() as kernels:
        o, _ = chunk_kda(*packed, leaf(1, 192, 2), **rates, **INSIDE, **gate, impl="triton")
        o.float().sum().backward()
    return [k for k in dict.fromkeys(kernels) if "fold" not in k.kernel]


def compile_member(
    name: str, K: int, V: int, dtype: torch.dtype, gate: dict, H: int = 1
) -> list[Launch]:
    """Kernels of a member of the family with two value heads, forward and backward of a sequence in
    three segments."""
    import fla_cp
    from benchmarks.tune import cut_into

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
    with cut_into(1), launched() as kernels:
        o, _ = getattr(fla_cp, f"chunk_{name}")(*x, **rates, **inside, **gate, impl="triton")
        o.float().sum().backward()
    return [k for k in dict.fromkeys(kernels) if "fold" not in k.kernel]


def of_squares(call: Callable[[], list[Launch]]) -> list[Launch]:
    """Of the launches those of kernels that write or read T and Aqk, which two terms change."""
    return [k for k in call() if k.kernel.startswith(("scan", "intra_kernel", "intra_head"))]


def compile_recurrent(K: int, V: int, dtype: torch.dtype, v_first: bool) -> list[Launch]:
    """A decoding step of a layer."""
    from fla_cp import fused_recurrent_kda

    x = [torch.zeros(4, 1, h, d, dtype=dtype) for h, d in ((1, K), (1, K), (2, V), (2, K))]
    state = torch.zeros(4, 2, *((V, K) if v_first else (K, V)))
    with launched() as kernels:
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


def compile_conv(dtype: torch.dtype, halo: bool) -> list[Launch]:
    """Forward and backward with four taps, SiLU and a bias; with a halo as under a context."""
    from fla_cp.kernels.torch.conv import ConvRows
    from fla_cp.kernels.triton.conv import conv, conv_bwd

    x, weight, bias = (torch.zeros(*s, dtype=dtype) for s in ((256, 1000), (1000, 4), (1000,)))
    where = ConvRows.build(torch.zeros(256), (256,), 3 * halo, x.device)
    front = x.new_empty(len(where.halo), 1000)
    with launched() as kernels:
        y = conv(x, front, where, weight, bias, True)
        conv_bwd(x, front, where, weight, bias, True, y)
    return list(dict.fromkeys(kernels))


def compile_gate(dtype: torch.dtype, lower_bound: float | None) -> list[Launch]:
    from fla_cp import kda_gate

    g, A_log, dt_bias = (
        torch.zeros(*s, requires_grad=True) for s in ((256, 2, 128), (2,), (2 * 128,))
    )
    with launched() as kernels:
        kda_gate(
            g.to(dtype), A_log, dt_bias, lower_bound=lower_bound, impl="triton"
        ).sum().backward()
    return list(dict.fromkeys(kernels))


def compile_walk(K: int, V: int) -> list[Launch]:
    """A fold with states that enter, in reverse, with the transitions, and of what ranks sent."""
    from fla_cp.comm.affine import FoldTable
    from fla_cp.kernels.triton.fold import fold
    from fla_cp.partition.packing import Packing

    steps = FoldTable((0, 1), (0,), (0,), (0,), (0,), (1,))
    packing, (M, B) = Packing.build((0, 64)), (torch.zeros(2, 2, K, n) for n in (K, V))
    wire = torch.zeros(2, 2, K, V + K)
    with launched() as kernels:
        for transposed in (False, True):
            fold(packing, steps, M, B, B, B, transposed=transposed)
            fold(packing, steps, M, B, None, B, transposed=transposed)
            fold(packing, steps, M, B, None, wire, transposed=transposed)
        fold(packing, steps, wire[..., V:], wire[..., :V], None, B, transposed=False)
    return list(dict.fromkeys(kernels))


def configurations() -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """What is compiled, by name: each size and dtype with the tiles that the table gives, and each
    candidate tile at K = V = 128."""
    from benchmarks import tune
    from benchmarks.tune import GROUPED, forced
    from fla_cp.kernels.triton import tile_table

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
        for family in ("comba", "gla", "simple_gla"):
            call = functools.partial(compile_member, family, 128, 128, dtype, {})
            yield f"{family} {name} any", call
            if name == "bf16":
                call = functools.partial(compile_member, family, 128, 128, dtype, HIGH)
                yield f"{family} {name} any high", functools.partial(of_squares, call)
        call = functools.partial(compile_member, "comba", 128, 128, dtype, {}, H=2)
        yield f"comba {name} head", call
    for K, V in ((96, 64), (128, 128), (256, 256)):
        for gate, options in (("safe", SAFE | HIGH), ("any", HIGH)):
            call = functools.partial(compile_call, K, V, torch.bfloat16, options)
            yield f"{K}x{V} bf16 {gate} high", functools.partial(of_squares, call)
        for H, groups in ((1, " groups"), (2, "")):
            options = (K, V, torch.bfloat16, HIGH, H)
            call = functools.partial(compile_member, "gated_delta_rule", *options)
            yield f"{K}x{V} bf16 head{groups} high", functools.partial(of_squares, call)
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

    def head_in_triton(
        tiles: dict[str, tile_table.Tile], family: str = "gated_delta_rule"
    ) -> list[Launch]:
        with forced(tiles):
            return compile_member(family, 128, 128, torch.bfloat16, {}, H=2)

    chunks = {k[1]: t for k, t in tile_table.TABLE.items() if k[1] == "intra_head"}
    for family in ("gated_delta_rule", "comba", "simple_gla"):
        call = functools.partial(head_in_triton, chunks, family)
        yield f"{family} bf16, chunks in Triton", call

    scans = {k[1]: t for k, t in tile_table.TABLE.items() if k[1].startswith("scan")}
    yield "128x128 bf16 head, scans in Triton", functools.partial(head_in_triton, scans)
    fuller = {
        k[1]: n
        for k, of in tile_table.TILES_BY_CHAINS.items()
        for c, n in of
        if c < tile_table.FULL_V_MIN_CHAINS
    }
    call = functools.partial(head_in_triton, scans | fuller)
    yield "128x128 bf16 head, scans in Triton, more chains", call

    def high_with(tiles: dict[str, tile_table.Tile], of_heads: bool) -> list[Launch]:
        with forced(tiles):
            if of_heads:
                return compile_member("gated_delta_rule", 128, 128, torch.bfloat16, HIGH, H=2)
            return compile_call(128, 128, torch.bfloat16, SAFE | HIGH)

    for some in (tile_table.FULL_V_MIN_CHAINS, tile_table.FULL_V_MIN_CHAINS - 1):
        wide = {
            k[1]: t
            for k, of in tile_table.TILES_BY_CHAINS.items()
            for c, t in reversed(of)
            if c <= some
        }
        for of_heads in (False, True):
            if (
                some < tile_table.FULL_V_MIN_CHAINS or not of_heads
            ):  # with one decay a head: `_tile`
                call = functools.partial(high_with, wide, of_heads)
                name = f"128x128 bf16{' head' * of_heads} high, {some} chains"
                yield name, functools.partial(of_squares, call)

    def with_tile(stage: str, tile: tile_table.Tile) -> list[Launch]:
        options = {} if stage.endswith("_any") else SAFE
        of_heads = "head" in stage or stage.endswith("_concurrent")
        kernels = []
        with forced({stage.removesuffix("_concurrent"): tile}):
            if of_heads:
                H = 1 if stage in GROUPED else 2
                kernels += compile_member("gated_delta_rule", 128, 128, torch.bfloat16, {}, H=H)
            if "head" not in stage:
                kernels += compile_call(128, 128, torch.bfloat16, options)
        name = stage.removesuffix("_concurrent").removesuffix("_any")
        name = name.removesuffix("_states").removesuffix("_ends")
        name = {"scores_bwd_head": "scores_head_bwd", "intra_bwd": "safe_bwd"}.get(stage, name)
        name += "_hopper" * tile.hopper
        return [k for k in kernels if k.kernel == f"{name}_kernel"]

    for stage in sorted({stage for _, stage, *_ in tile_table.TABLE}):
        for tile in tune.candidates(stage, 128, 128):
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
            f"copies over what products read: {k.overwritten}" if k.overwritten else "",
            f"waits for all products: {k.serial[0]}" if k.serial and "hopper" in k.kernel else "",
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


def compile_all(
    calls: Iterable[tuple[str, Callable[[], list[Launch]]]],
) -> dict[str, list[Compiled]]:
    """The kernels of configurations, by name."""
    torch.set_num_threads(1)
    launches, named = {}, {}
    for name, call in calls:
        launches[name] = call()
        for key in _LATER.calls:
            named.setdefault(key, (name, key))
    todo = list(named.values())
    chunks = [todo[n : n + TOGETHER] for n in range(0, len(todo), TOGETHER)]
    done: dict[str, Compiled] = {}
    fork = multiprocessing.get_context("fork")  # what is to be compiled cannot be sent
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), fork, start_worker) as pool:
        for chunk, kernels in zip(chunks, pool.map(compile_together, chunks), strict=True):
            done.update(zip((key for _, key in chunk), kernels, strict=True))
            print(f"{len(done)} of {len(todo)}: {chunk[-1][0]}", file=sys.stderr, flush=True)
    return {n: list(dict.fromkeys(done[k.key] for k in of)) for n, of in launches.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what is compiled in aot.json")
    parser.add_argument("--only", help="compile one configuration, by its name in aot.json")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="compile all if a kernel file changed since --write, else every fourth configuration",
    )
    args = parser.parse_args()
    if args.write and (args.only or args.changed):
        parser.error("--write keeps all configurations: leave --only and --changed out")
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key = f"triton {triton.__version__}"
    written_for = f"kernels of {key}"
    every = list(configurations())
    if args.changed and kept.get(written_for) == kernel_hashes():
        every = every[::4]  # the same source and compiler give the same code
    kernels = compile_all(c for c in every if args.only in (None, c[0]))
    if not kernels:
        parser.error(f"--only must name a configuration of aot.json, got {args.only!r}")
    rows = {name: record(name, of) for name, of in kernels.items()}
    problems = [problem for name, of in kernels.items() for problem in check(name, of)]
    if args.write:
        kept[key], kept[written_for] = dict(sorted(rows.items())), kernel_hashes()
        lines = (
            f" {json.dumps(v)}: {{\n"
            + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in kept[v].items())
            + "\n }"
            for v in sorted(kept)
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif key in kept:
        known = kept[key]
        if args.only or args.changed:
            known = {name: known[name] for name in rows if name in known}
        problems += changes(known, rows)
    print("\n".join(problems))
    print(f"{len(rows)} configurations compiled with {key}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
