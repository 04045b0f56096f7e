"""The checks that tests.gpu runs on a GPU, against fp64 and an error budget.

Each check runs the kernels, the torch stages, and the torch stages in fp64 on the same rounded
inputs. It runs the kernels a second time, which must give the same bits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from fla_cp import causal_conv1d, kda_gate
from tests.gpu.cases import BF16, FP16, FP32, SIZES, cases, recurrent_cases
from tests.support.cases import INSIDE, Case, named, options
from tests.support.closeness import share_of_budget
from tests.support.members import BY_NAME, Call, collect, draw, operator
from tests.support.rounded import Rounding, rounded_dplr
from tests.support.running import run, run_pooled, run_recurrent
from tests.support.tuned import tuned

CONVOLUTIONS = (
    (1, 96, 4, None),
    (1000, 200, 2, (0, 1, 65, 65, 1000)),
    (8192, 1000, 4, (0, 3000, 8192)),
    (70000, 512, 4, None),
    (300, 96, 8, None),
)
"""T, D, W, cu_seqlens."""
FAMILY = ((16, 16, 65), (64, 64, 64), (96, 64, 1000), (128, 128, 1000), (256, 256, 65))
"""K, V, T of the members."""
CANCELLING = Path(__file__).parents[2] / "benchmarks/results/current/precision.json"
"""Written by `benchmarks.precision --peer fla`."""
RANGES, CHANNELS = (700, 33), 300
"""Tokens of a rank's two ranges, and channels of the convolution over ranks."""
GATES = ((1, 1, 16), (1000, 3, 96), (8192, 4, 128))
"""T, H, K of the gate alone."""

KEPT = {"disable_recompute": True}
HALF = BF16, FP16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On the CPU, checks can be tried in Triton's interpreter."""

Named = dict[str, Tensor]
Rows = list[dict]


def check_cases(K: int, V: int, share: slice) -> Rows:
    """Largest share of the error budget over outputs and gradients, for each case of one size."""
    return [one(K, V, *case) for case in [*cases(K, V)][share]]


def check_hopper(key: str, share: slice) -> Rows:
    """The Gluon kernels, which calls of this size would not take, for whole sequences and in
    segments.

    The segments have two chunks. key: name of a member.
    """
    from benchmarks.tune import cut_into

    rows = []
    with tuned(min_chunk_heads=0):
        for cut in (False, True):
            name = " in segments" * cut
            with cut_into(2) if cut else nullcontext():
                if key == "kda":
                    found = [c for c in [*cases(128, 128)][share] if c[2] == BF16]
                    rows += [one(128, 128, f"hopper {c[0]}{name}", *c[1:]) for c in found]
                    continue
                for T, H in ((130, 2), (1000, 2), (130, 4), (1000, 4)):
                    name_of = f"hopper {key} T={T} H={H}{name}"
                    rows.append(check_member(key, 128, 128, T, BF16, name=name_of, H=H))
    return rows


REPEATS = 200
"""Calls of each stage that must give the same bits, of 16384 chunks each: a race that strikes once
in a million shows."""


def check_repeats(path: str) -> Rows:
    """Runs each stage many times at a size that fills a GPU, and compares bits.

    path: see `stages`.
    """
    from benchmarks.tune import stages

    rows = []
    for group in (1, 2) if path == "_head" else (1,):
        kept = {}
        for name, stage in stages(128, 128, BF16, 32768, 32, path=path, group=group).items():
            first = [t.clone() for t in tensors_of(stage())]
            changed = torch.zeros((), device=DEVICE)
            for _ in range(REPEATS):
                found = tensors_of(stage())
                changed += sum((a != b).any() for a, b in zip(found, first, strict=True))
            case = f"{name} of {path or 'safe'} x {REPEATS}, group {group}"
            row = {"K": 128, "V": 128, "case": case, "dtype": "bfloat16"}
            rows.append(row | {"changed": int(changed), "ok": int(changed) == 0})
            if name in ("begin", f"intra{path}"):
                kept[name] = first
        # chunks on two streams are those on one
        pairs = zip(kept[f"intra{path}"], kept["begin"], strict=False)
        apart = sum(int((a != b).any()) for a, b in pairs)
        row |= {"case": f"begin of {path or 'safe'} as intra, group {group}", "changed": apart}
        rows.append(row | {"ok": apart == 0})
    return rows


def check_cancelling() -> Rows:
    """Inputs for which o is a small difference of large terms.

    Each precision and both kinds of kernels are compared with the error of rounding their operands
    (rounded.py), and with FLA's errors as last measured.
    """
    from fla_cp import chunk_gated_delta_rule, chunk_kda
    from tests.support import rounded

    theirs = json.loads(CANCELLING.read_text())["errors"] if CANCELLING.exists() else {}
    rows = []
    case = named("cancelling", T=4096, H=8, HV=8, K=128, V=128, states=False)
    do = torch.randn(1, 4096, 8, 128, generator=torch.Generator().manual_seed(2)).to(DEVICE, BF16)
    for op in (chunk_kda, chunk_gated_delta_rule):
        per_head = op is not chunk_kda
        x, keywords = rounded.inputs(case, per_head, DEVICE)
        wide = {n: t.double() for n, t in x.items()}
        exact = rounded.results(op, wide, do, keywords | {"impl": "torch"})
        into = do, torch.zeros_like(exact["final_state"])
        for precision, gluon in product(("default", "high"), (True, False)):
            more = {"impl": "triton", "precision": precision}
            with tuned(min_chunk_heads=0) if gluon else tuned(gluon=False):
                found = rounded.results(op, x, do, keywords | more)
            r = rounded.Rounding(BF16, precision == "high", per_head)
            expected = rounded.relative(rounded.rounded(case, wide, r, into), exact)
            errors = rounded.relative(found, exact)
            names = rounded.LINEAR if per_head else rounded.NAMES
            use, worst = max((errors[n] / expected[n] / rounded.BUDGET, n) for n in names)
            kernels = "Gluon" if gluon else "Triton"
            row = {"K": 128, "V": 128, "dtype": "bfloat16", "use": use, "worst": worst}
            row["case"] = f"cancelling {op.__name__}, {precision}, scans in {kernels}"
            peers = {"of FLA": theirs.get(op.__name__, {}).get("FLA")}
            rows.append(row | {"errors": errors, "ok": use <= 1.0} | peers)
    return rows


def tensors_of(x: object) -> list[Tensor]:
    """The tensors of a stage's result that are not empty."""
    if isinstance(x, Tensor):
        return [x] if x.numel() else []
    if isinstance(x, tuple):
        return [t for item in x for t in tensors_of(item)]
    return [] if not hasattr(x, "offset") else tensors_of((x.offset, x.transition))


def check_recurrent(K: int, V: int) -> Rows:
    rows = []
    for name, case, dtype, v_first in recurrent_cases(K, V):

        def call(x: Named, impl: str, case: Case = case, v_first: bool = v_first) -> Named:
            return run_recurrent(case, impl=impl, device=DEVICE, inputs=x, v_first=v_first)

        rows.append({"K": K, "V": V, "case": name} | judged(call, case.inputs(dtype=dtype), dtype))
    pooled = Case("p", B=3, T=5, H=2, HV=4, K=K, V=V, options=options(**INSIDE))
    for v_first, drafts in product((False, True), (False, True)):

        def call(x: Named, impl: str, v_first: bool = v_first, drafts: bool = drafts) -> Named:
            return run_pooled(pooled, impl, DEVICE, x, v_first=v_first, drafts=drafts)

        name = f"recurrent {'VK' if v_first else 'KV'} {'drafts' if drafts else 'pool'}"
        rows.append({"K": K, "V": V, "case": name} | judged(call, pooled.inputs(dtype=BF16), BF16))
    return rows


def one(K: int, V: int, name: str, case: Case, dtype: torch.dtype) -> dict:
    """Checks a case of `chunk_kda`."""

    def call(x: Named, impl: str) -> Named:
        return run(case, impl=impl, device=DEVICE, inputs=x)

    def gate_errors(x: Named, actual: Named, exact: Named) -> Named:
        return (
            summed_errors(case, x, actual["dg"].double() - exact["dg"]) if "dA_log" in exact else {}
        )

    return {"K": K, "V": V, "case": name} | judged(
        call, case.inputs(dtype=dtype), dtype, gate_errors
    )


def nothing(x: Named, actual: Named, exact: Named) -> Named:
    return {}


def judged(
    call: Callable[[Named, str], Named],
    x: Named,
    dtype: torch.dtype,
    additional: Callable[[Named, Named, Named], Named] = nothing,
    operands: Callable[[Named], Named] | None = None,
) -> dict:
    """One row of the report.

    call(inputs, impl) returns the results by name. additional(fp64 inputs, actual, exact) returns
    further errors that some results may have, see `summed_errors`. operands(fp64 inputs) returns
    the results with rounded operands, see `share_of_budget`.
    """
    row: dict = {"dtype": str(dtype).removeprefix("torch.")}
    try:
        started = time.perf_counter()
        actual = call(x, "triton")
        row["first_call_s"] = round(time.perf_counter() - started, 2)
        again = call(x, "triton")
        wide = {n: t.double() for n, t in x.items()}
        exact, plain = call(wide, "torch"), call(x, "torch")
        row["same_bits"] = all(torch.equal(actual[n], again[n]) for n in actual)
        more = additional(wide, actual, exact)
        if dtype == FP32 and {"q", "A_log"} <= x.keys():
            more = added(more, of_approximations(call, wide, exact))
        rounded = operands(wide) if operands else {}

        def use(n: str) -> float:
            off = more.get(n), dtype, rounded.get(n)
            return share_of_budget(actual[n], exact[n], plain[n], *off)

        row["use"], row["worst"] = max((use(n), n) for n in actual)
        row["ok"] = row["same_bits"] and row["use"] <= 1.0
    except Exception as error:  # reported, and the process goes on or dies with the GPU context
        row.update(ok=False, error=repr(error)[:200])
    return row


def of_approximations(call: Callable[[Named, str], Named], x: Named, exact: Named) -> Named:
    """The change of the results if every log decay changes by 2^-21 of itself.

    ex2.approx, lg2.approx and rsqrt.approx each err by up to two units, equally for all tokens of a
    chunk.
    """
    moved = call(x | {"A_log": x["A_log"] + 2**-21}, "torch")
    return {n: (moved[n] - exact[n]).abs() for n in exact}


def added(a: Named, b: Named) -> Named:
    return {n: a[n] + b[n] if n in a and n in b else a.get(n, b.get(n)) for n in a | b}


def check_family(key: str) -> Rows:
    """Checks a member other than KDA: outputs, states and gradients, and token by token."""
    rows = [
        check_member(key, K, V, T, dtype, inside, stepwise, H=H)
        for K, V, T in FAMILY
        for dtype, inside in ((BF16, True), (FP32, True), (FP32, False))
        for stepwise in (False, True)
        for H in (2, 4)
        if (not stepwise or (T <= 64 and inside)) and (H == 2 or (inside and not stepwise))
    ]
    return rows + (check_paths(key) if key == "dplr_delta_rule" else [])


def check_paths(key: str) -> Rows:
    """Both paths of the local stages with a decay a channel, for decays from none to one that
    forgets at once; with "mixed" each of them serves some chunks."""
    safe = {"safe": (2.0, {"safe_gate": True}), "safe kept": (2.0, KEPT | {"safe_gate": True})}
    given = {"none": (0.0, {}), "slow": (1e-3, {}), "mixed": (7.0, {}), "strong": (40.0, {})}
    rows = []
    for (K, V, T), (name, (decay, more)) in product(FAMILY, (safe | given).items()):
        for dtype in HALF:
            call = Call(T=T, HV=4, K=K, V=V, decay=decay, options=tuple(more.items()))
            named = f"{key} T={T} {name}"
            keeps = name in ("none", "slow")
            rows.append(check_member(key, K, V, T, dtype, name=named, call=call, keeps=keeps))
    return rows


def check_member(
    key: str,
    K: int,
    V: int,
    T: int,
    dtype: torch.dtype,
    inside: bool = True,
    stepwise: bool = False,
    name: str = "",
    H: int = 2,
    call: Call | None = None,
    keeps: bool = False,
) -> dict:
    """call: shapes and options, instead of those that the other arguments stand for. keeps: the
    state, which must be that of DPLR, forgets nothing of itself."""
    member = BY_NAME[key]
    call = call or Call(T=T, H=H, HV=4, K=K, V=V, inside=inside)
    inside = call.inside
    x, keywords, weights = draw(member, call)
    x = {n: t.to(dtype if n in member.arguments else FP32) for n, t in x.items()}
    weights = [w.to(DEVICE) for w in weights]
    if call.cu is not None:
        keywords["cu_seqlens"] = torch.tensor(call.cu, device=DEVICE)

    def results(x: Named, impl: str) -> Named:
        x = {n: t.to(DEVICE) for n, t in x.items()}
        form = "fused_recurrent" if stepwise else "chunk"
        op = partial(operator, member, form, **keywords, impl=impl)
        with_grads = collect(op, x, weights)
        if not stepwise:
            return with_grads
        with torch.no_grad():  # as in decoding
            return with_grads | {f"{n} alone": t for n, t in zip(("o", "S"), op(x), strict=True)}

    how = " token by token" * stepwise + " given" * (not inside) + " no groups" * (H == 4)
    row = {"K": K, "V": V, "case": name or f"{key} T={T}{how}"}
    into = {"do": weights[0], "dS": weights[1], "r": Rounding(dtype)}
    operands = partial(rounded_dplr, **into) if keeps else None
    return row | judged(results, x, dtype, of_gates if inside else nothing, operands)


def of_gates(x: Named, actual: Named, exact: Named) -> Named:
    """The errors that dA_log and ddt_bias may have.

    They are six standard deviations of a sum over tokens (and channels) of errors like those of dg,
    equal within a chunk, each weighted by up to three.
    """
    dg = "dgk" if "dgk" in exact else "dg"
    error = actual[dg].double() - exact[dg]
    heads = exact["dA_log"].numel()
    size = 18 * error.square().mean().sqrt() * (64 * error.numel() / heads) ** 0.5
    return {n: size * torch.ones_like(exact[n]) for n in ("dA_log", "ddt_bias")}


def with_gradients(y: Tensor, leaves: Named, dy: Tensor) -> Named:
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y))
    return {"y": y.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def on_gpu(x: Named) -> Named:
    return {n: t.detach().to(DEVICE).requires_grad_() for n, t in x.items()}


def check_conv_and_gate() -> Rows:
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    rows = []
    for dtype in (BF16, FP16, FP32):
        for T, D, W, cu in CONVOLUTIONS:
            for silu in ("silu", None):
                x = {"x": draw(1, T, D, dtype=dtype), "weight": draw(D, W, dtype=dtype)}
                if silu:
                    x["bias"] = draw(D, dtype=dtype)
                dy = draw(1, T, D)
                offsets = None if cu is None else torch.tensor(cu, device=DEVICE)

                def conv(x: Named, impl: str, dy=dy, silu=silu, offsets=offsets) -> Named:
                    x = on_gpu(x)
                    y = causal_conv1d(**x, activation=silu, cu_seqlens=offsets, impl=impl)
                    return with_gradients(y, x, dy)

                row = judged(conv, x, dtype, partial(of_sums, dy=dy))
                rows.append({"case": f"conv T={T} D={D} W={W} {silu} cu={cu}"} | row)
        for halo in (False, True):
            T = sum(RANGES)
            D = CHANNELS
            shapes = {"x": (T, D), "halo": (6 * halo, D), "weight": (D, 4)}
            shapes |= {"bias": (D,), "dy": (T, D)}
            x = {n: draw(*shape, dtype=dtype) for n, shape in shapes.items()}
            row = judged(conv_stage, x, dtype, partial(of_sums, dy=x["dy"]))
            rows.append({"case": f"conv two ranges{' halo' * halo}"} | row)
        for T, H, K in GATES:
            for bound in (None, -5.0):
                x = {"g": 4 * draw(T, H, K, dtype=dtype)}
                x |= {"A_log": draw(H, dtype=FP32), "dt_bias": draw(H * K, dtype=FP32)}
                dout = draw(T, H, K)

                def gate(x: Named, impl: str, bound=bound, dout=dout) -> Named:
                    x = on_gpu(x)
                    y = kda_gate(**x, lower_bound=bound, impl=impl)
                    return with_gradients(y, x, dout)

                row = judged(gate, x, dtype, partial(of_gate, dout=dout, bound=bound))
                rows.append({"case": f"gate T={T} H={H} K={K} bound={bound}"} | row)
    return rows


def of_sums(x: Named, actual: Named, exact: Named, *, dy: Tensor) -> Named:
    """The errors that the gradients of a convolution may have.

    dweight and dbias add up T terms before they round. dx and dhalo add up W products with a slope
    of the activation, which is at most 1.1.
    """
    eps = torch.finfo(FP32).eps
    unit = eps * exact["dx"].shape[-2]
    off = {n: torch.full_like(t, unit) for n, t in exact.items() if n in ("dweight", "dbias")}
    products = 1.1 * dy.abs().max().item() * x["weight"].abs().sum(1).max().item()
    for n in ("dx", "dhalo"):
        if n in exact:
            off[n] = torch.full_like(exact[n], eps * products)
    return off


def of_gate(x: Named, actual: Named, exact: Named, *, dout: Tensor, bound: float | None) -> Named:
    """The errors that the gradients of a gate may have in fp32.

    They are six standard deviations of the roundings of their terms. dA_log and ddt_bias add up
    terms of both signs, so the terms count, not the sum: its error does not shrink if they happen
    to cancel. A term is a product with a sigmoid of z, which errs by four units and by |z| more,
    since z is rounded first. For the bounded gate it also has the factor 1 - sigmoid, which rounds
    like 1 even if it is small (`sigmoid_slope` in device/gates.py).
    """
    H, K = x["g"].shape[-2:]
    raw = x["g"] + x["dt_bias"].view(H, K)
    rate = x["A_log"].exp()[:, None]
    if bound is None:
        weight = torch.nn.functional.softplus(raw) / raw.sigmoid()
        off = rate * raw.sigmoid() * (4 + raw.abs())
    else:
        z = rate * raw
        s = z.sigmoid()
        off = (bound * s * (4 * s + (4 + z.abs()) * (1 - s))).abs()
        weight, off = raw, rate * off
    to_raw = 6 * torch.finfo(FP32).eps / 2 * off * dout.to(off).abs()
    to_log = to_raw * weight.abs()
    sums = {"dA_log": to_log.square().sum((0, 2)), "ddt_bias": to_raw.square().sum(0).flatten()}
    return {"dg": to_raw} | {n: t.sqrt() for n, t in sums.items()}


def conv_stage(x: Named, impl: str) -> Named:
    """Both stages of the convolution for a rank with two ranges, with a halo or an empty one."""
    from fla_cp.kernels import resolve
    from fla_cp.kernels.torch.conv import ConvInputs, ConvRows

    x = {n: t.to(DEVICE) for n, t in x.items()}
    halo, W = len(x["halo"]) > 0, x["weight"].shape[1]
    reach = torch.cat([torch.arange(n) + 100 * halo for n in RANGES])
    where = ConvRows.build(reach, RANGES, (W - 1) * halo, x["x"].device)
    backend = resolve(impl, x["x"].device, x["x"].dtype)
    inputs = ConvInputs(x["x"], x["halo"], where, x["weight"], x["bias"], True)
    dx, dhalo, dweight, dbias = backend.conv_bwd(inputs, x["dy"])
    found = {"y": backend.conv(inputs), "dx": dx, "dweight": dweight, "dbias": dbias}
    return found | ({"dhalo": dhalo} if halo else {})


def summed_errors(case: Case, x: Named, error: Tensor) -> Named:
    """The errors that the gate's sums over tokens may have, given the error of dg [B, T, HV, K].

    dA_log and ddt_bias add up weight * dg before dg is rounded. The result is six standard
    deviations of a sum of errors as large as those of dg, equal within a chunk (dg is a sum along
    it) and independent between chunks and channels.
    """
    raw = x["g"].to(error.device)
    if "dt_bias" in x:
        raw = raw + x["dt_bias"].to(error.device).view(raw.shape[-2:])
    if dict(case.options).get("lower_bound") is None:  # weight: (dg / dA_log) / (dg / draw)
        weight = torch.nn.functional.softplus(raw) / raw.sigmoid()
    else:
        weight = raw
    size = error.square().mean((0, 1), keepdim=True).sqrt()

    def variance(w: Tensor) -> Tensor:
        terms = (w.abs() * size).flatten(0, 1)
        terms = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, -len(terms) % 64))
        return terms.unflatten(0, (-1, 64)).sum(1).square().sum(0)

    return {
        "dA_log": 6 * variance(weight).sum(-1).sqrt(),
        "ddt_bias": 6 * variance(torch.ones_like(weight)).sqrt().flatten(),
    }


def parts() -> dict[str, Callable[[], Rows]]:
    """The checks that run in a process of their own, by name."""
    from tests.gpu.attention import check_attention
    from tests.gpu.clock import check_clock
    from tests.gpu.conv_states import check_conv_states
    from tests.gpu.decoding import check_decoding
    from tests.gpu.drafts import check_drafts
    from tests.gpu.exchange import check_exchange
    from tests.gpu.experts import check_experts
    from tests.gpu.frames import check_frames
    from tests.gpu.layers import check_layers, check_norm
    from tests.gpu.short_chunks import short_parts
    from tests.gpu.step_layers import check_step_layers
    from tests.gpu.tables import check_tables
    from tests.gpu.tiles import check_tiles
    from tests.gpu.wide_heads import check_split, check_wide

    found: dict[str, Callable[[], Rows]] = {"conv,gate": check_conv_and_gate}
    found["cancelling"] = check_cancelling
    found |= {"exchange": check_exchange, "norm": check_norm, "layers": check_layers}
    found |= {"experts": check_experts, "decoding": check_decoding, "attention": check_attention}
    found |= {"conv states": check_conv_states, "tables": check_tables}
    found |= {"drafts": check_drafts, "clock": check_clock, "step layers": check_step_layers}
    found |= {f"wide {key}": partial(check_wide, key) for key in ("gla", "simple_gla")}
    found |= {"split heads": check_split, "frames": check_frames}
    found |= short_parts()
    for K, V in SIZES:
        for n in range(3):
            found[f"{K},{V} cases {n}"] = partial(check_cases, K, V, slice(n, None, 3))
        found[f"{K},{V} recurrent"] = partial(check_recurrent, K, V)
        if (K, V) in ((64, 64), (128, 128)):
            for n in range(6):
                found[f"{K},{V} tiles {n}"] = partial(check_tiles, K, V, slice(n, None, 6))
    for path in ("", "_any", "_head", "_own", "_any_own"):
        found[f"repeats{path}"] = partial(check_repeats, path)
    for n in range(3):
        found[f"hopper {n}"] = partial(check_hopper, "kda", slice(n, None, 3))
    for key in BY_NAME:
        if key != "kda":
            found[key] = partial(check_family, key)
            found[f"hopper {key}"] = partial(check_hopper, key, slice(None))
    return found
