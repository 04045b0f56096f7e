"""Causal softmax attention: on one GPU beside PyTorch's own call, and under a context by exchange.

    python -m benchmarks.attention [--shapes gqa-128,mla] [--tokens 32768] [--out FILE.json]
    python -m benchmarks.attention --ranks 2,4,8 [--exchanges gathered,ring] [--out FILE.json]

The peer is torch.nn.attention.varlen.varlen_attn on the same documents (SDPA document by document
on a CPU). Before anything is timed, o and the gradients of a small case are compared with fp64.
With --ranks, every number of ranks runs in processes of its own over NCCL (gloo with --device cpu),
with contiguous and with zig-zag ranges; "busy" is a rank's time without its waits for others, and
balance that of the slowest rank over the mean.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import units
from benchmarks.ops import environment

STEPS, REPEATS = 5, 5
"""Calls that are timed together, and how often; the median counts."""

MAX_ERROR = 2e-2
"""Largest relative error of a result in bf16 with which times are printed."""

LAYOUTS = ("contiguous", "zigzag")


class Heads(NamedTuple):
    """H query heads and HK key heads, K and V channels."""

    H: int
    HK: int
    K: int
    V: int


SHAPES = {
    "gqa-128": Heads(16, 2, 128, 128),
    "gqa-256": Heads(16, 2, 256, 256),
    "mha-128": Heads(16, 16, 128, 128),
    "mla": Heads(16, 16, 192, 128),  # flash attention pads V to 192 channels
}
TINY = {"gqa-128": Heads(4, 2, 16, 16), "mla": Heads(4, 4, 24, 16)}
"""What --device cpu runs."""

DOCUMENTS = {
    "one document": (1.0,),
    "eight documents": (0.3, 0.2, 0.15, 0.1, 0.1, 0.07, 0.05, 0.03),
}
"""Shares of the tokens."""


def offsets_of(documents: str, T: int) -> tuple[int, ...]:
    found, total = [0], 0.0
    for share in DOCUMENTS[documents]:
        total += share
        found.append(round(total * T))
    return (*found[:-1], T)


def draw(T: int, heads: Heads, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, which require gradients, and do."""
    gen = torch.Generator(device).manual_seed(0)
    H, HK, K, V = heads
    sizes = ((H, K), (HK, K), (HK, V), (H, V))
    found = [torch.randn(1, T, *s, device=device, generator=gen).to(dtype) for s in sizes]
    return [*(x.requires_grad_() for x in found[:3]), found[3]]


def documents_one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """SDPA of each document, for checks and for CPUs."""
    parts = []
    for lo, hi in pairwise(offsets):
        x = (t[:, lo:hi].transpose(1, 2) for t in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True))
    return torch.cat(parts, 2).transpose(1, 2)


def varlen(offsets: tuple[int, ...], heads: Heads, device: str = "cuda") -> Callable[..., Tensor]:
    """PyTorch's call for packed documents, with V padded to K as its kernel wants."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "window_size" not in known:  # torch 2.10
        options = {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = heads.H != heads.HK
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = max(hi - lo for lo, hi in pairwise(offsets))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = F.pad(v, (0, heads.K - heads.V)) if heads.V < heads.K else v
        found = varlen_attn(q[0], k[0], wide[0], cu, cu, longest, longest, **options)
        o: Tensor = found[None, ..., : heads.V]
        return o

    return call


CHECKED = {
    "cpu": (("eight documents", 300),),
    "cuda": (("eight documents", 300), ("one document", 5000)),
}
"""Documents and tokens of the cases that are compared with fp64, by device: cuDNN computes only
long documents."""


def errors(heads: Heads, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The largest relative errors of o and the gradients against fp64, in small cases. Raises
    SystemExit if one is too large."""
    cases = [case_errors(heads, device, dtype, *case) for case in CHECKED[device]]
    return {name: max(case[name] for case in cases) for name in cases[0]}


def case_errors(
    heads: Heads, device: str, dtype: torch.dtype, documents: str, T: int
) -> dict[str, float]:
    from fla_cp import causal_attention

    *given, do = draw(T, heads, device, dtype)
    offsets = offsets_of(documents, T)
    cu = torch.tensor(offsets, device=device)
    o = causal_attention(*given, cu_seqlens=cu)
    found = [o, *torch.autograd.grad(o, given, do)]
    wide = [x.detach().double().requires_grad_() for x in given]
    exact_o = documents_one_by_one(*wide, offsets)
    exact = [exact_o, *torch.autograd.grad(exact_o, wide, do.double())]
    names = ("o", "dq", "dk", "dv")
    rows = {
        name: ((a.double() - b).norm() / b.norm()).item()
        for name, a, b in zip(names, found, exact, strict=True)
    }
    if not max(rows.values()) <= MAX_ERROR:
        raise SystemExit(f"wrong results with {heads}: relative errors {rows}")
    return {name: float(f"{error:.2e}") for name, error in rows.items()}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call, when several follow each other."""
    for _ in range(3):
        call()
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - start) / STEPS)
    return statistics.median(found)


def forward_flops(heads: Heads, offsets: tuple[int, ...]) -> int:
    """Of both products, a multiplication and an addition counting as two."""
    pairs = sum((hi - lo) * (hi - lo + 1) // 2 for lo, hi in pairwise(offsets))
    return 2 * heads.H * pairs * (heads.K + heads.V)


def both_directions(
    call: Callable[..., Tensor], given: list[Tensor], do: Tensor, device: str
) -> tuple[float, float]:
    """Milliseconds of a forward without gradients, and of a forward and a backward."""
    with torch.no_grad():
        forward = milliseconds(lambda: call(*given), device)
    return forward, milliseconds(partial(gradients, call, given, do), device)


def alone(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One GPU, beside the peer."""
    from fla_cp import causal_attention

    for name in args.shapes:
        heads = args.known[name]
        checked = errors(heads, args.device, args.dtype)
        for T, documents in product(args.tokens, DOCUMENTS):
            offsets = offsets_of(documents, T)
            *given, do = draw(T, heads, args.device, args.dtype)
            cu = torch.tensor(offsets, device=args.device)
            ours = partial(causal_attention, cu_seqlens=cu, cu_seqlens_cpu=cu.cpu())
            peer = partial(documents_one_by_one, offsets=offsets)
            if args.device != "cpu":
                peer = varlen(offsets, heads)
            row: dict[str, Any] = {"shape": name, "T": T, "documents": documents}
            for side, call in (("ours", ours), ("torch", peer)):
                forward, both = both_directions(call, given, do, args.device)
                row[f"{side}_forward_ms"] = round(forward, 3)
                row[f"{side}_both_ms"] = round(both, 3)
                row[f"{side}_tflops"] = round(forward_flops(heads, offsets) / forward / 1e9, 1)
            yield row | {"errors": checked}


def rank_times(
    step: Callable[[], object], device: str, together: int = STEPS
) -> tuple[float, float]:
    """Medians of this rank: ms of a step, and of the waits for other ranks in it. together: how
    many steps are timed as one."""
    from fla_cp.comm import measure_exchange

    for _ in range(3):
        step()
    times, waits = [], []
    for _ in range(REPEATS):
        dist.barrier()
        synchronize(device)
        with measure_exchange() as timer:
            start = time.perf_counter()
            for _ in range(together):
                step()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - start) / together)
            waits.append(timer.elapsed_ms() / together)
    return statistics.median(times), statistics.median(waits)


def sharded(args: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """All schemes over the ranks of the default group."""
    from fla_cp import build_cp_context, zigzag_token_ranges

    R = dist.get_world_size()
    for name, T, documents in product(args.shapes, args.tokens, DOCUMENTS):
        offsets = torch.tensor(offsets_of(documents, T))
        whole = draw(T, args.known[name], device, args.dtype)
        for layout in LAYOUTS:
            ranges = zigzag_token_ranges(T, R) if layout == "zigzag" else None
            context = build_cp_context(
                offsets.to(device), dist.group.WORLD, cu_seqlens_cpu=offsets, token_ranges=ranges
            )
            local = [context.shard(x.detach()) for x in whole]
            place = {"shape": name, "T": T, "documents": documents, "ranks": R, "layout": layout}
            for row in exchanges(args, device, context, local):
                yield place | row


def exchanges(
    args: argparse.Namespace, device: str, context: Any, local: list[Tensor]
) -> Iterator[dict[str, Any]]:
    """Every scheme under a context. local: q, k, v and do of this rank."""
    from fla_cp import causal_attention
    from fla_cp.comm.keys_values import SCHEMES, Sizes, make_exchange
    from fla_cp.ops.attention_plan import key_tables

    *given, do = local
    for x in given:
        x.requires_grad_()
    q, k, v = given
    tables = key_tables(1, q.shape[1], None, context)
    sizes = Sizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())
    first = None
    for exchange in args.exchanges:
        if SCHEMES[exchange](tables, sizes).refusal() is not None:
            continue
        used, scheme = make_exchange(exchange, tables, sizes)
        call = partial(causal_attention, cp_context=context, exchange=exchange)
        o = call(*given)
        first = agreeing([o.detach(), *torch.autograd.grad(o, given, do)], first, exchange)
        del o
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        ms, wait = rank_times(partial(gradients, call, given, do), device)
        peak = 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        mine = torch.tensor([ms, ms - wait, peak], device=device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        times, busy, peaks = torch.stack(every).T.tolist()
        yield {
            "exchange": exchange,
            "used": used,
            "both_ms": round(max(times), 3),
            "busy_ms": round(max(busy), 3),
            "balance": round(max(busy) / statistics.mean(busy), 3),
            "bytes": scheme.busiest,
            "peak_gib": round(max(peaks), 2),
        }


def gradients(call: Callable[..., Tensor], given: list[Tensor], do: Tensor) -> object:
    return torch.autograd.grad(call(*given), given, do)


def agreeing(found: list[Tensor], first: list[Tensor] | None, exchange: str) -> list[Tensor]:
    """The results of the first scheme. Raises SystemExit if another's differ from them."""
    for a, b in zip(found, first or found, strict=True):
        if not (a - b).float().norm() <= MAX_ERROR * b.float().norm():
            raise SystemExit(f"exchange={exchange!r} differs from the first exchange")
    return first or found


def work(rank: int, R: int, args: argparse.Namespace, folder: str) -> None:
    device = args.device
    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // R))
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder}/store{R}",
        rank=rank,
        world_size=R,
        **({} if device == "cpu" else {"device_id": torch.device(device)}),
    )
    rows = []
    for row in sharded(args, device):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            Path(folder, f"rows{R}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def names(text: str) -> list[str]:
    return [x for x in text.split(",") if x]


def numbers(text: str) -> list[int]:
    return [int(n) for n in names(text)]


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments, with what follows from the device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__, allow_abbrev=False
    )
    kinds = ("cuda", "cpu")
    parser.add_argument("--device", choices=kinds, default=kinds[not torch.cuda.is_available()])
    parser.add_argument("--shapes", type=names)
    parser.add_argument("--tokens", type=numbers)
    parser.add_argument("--ranks", type=numbers, default=[])
    parser.add_argument("--exchanges", type=names, default=["gathered", "by_heads", "ring"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    args.known = TINY if args.device == "cpu" else SHAPES
    args.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    args.shapes = args.shapes or list(args.known)
    args.tokens = args.tokens or ([200] if args.device == "cpu" else [8192, 32768, 131072])
    return args


def main() -> None:
    import torch.multiprocessing as multiprocessing

    args = parsed()
    rows: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        if args.out:
            unit = units.CALLS
            unit += ", of the slowest rank" if args.ranks else ""
            kind = "attention over ranks" if args.ranks else "attention"
            result = {**environment(), "benchmark": kind, "unit": unit, "rows": rows}
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    if not args.ranks:
        for row in alone(args):
            print(json.dumps(row), flush=True)
            keep([row])
    for R in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, (R, args, folder), nprocs=R)
            keep(json.loads(Path(folder, f"rows{R}.json").read_text()))


if __name__ == "__main__":
    main()
