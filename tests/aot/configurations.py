"""Every call that is compiled: shapes, dtypes, options and tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import torch

from tests.aot import short_chunks
from tests.aot.compiling import Launch, launched

INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


SAFE = {"safe_gate": True, "lower_bound": -5.0}


HIGH = {"precision": "high"}


SIZES = ((16, 16), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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


def compile_dplr(K: int, V: int, dtype: torch.dtype, gate: dict) -> list[Launch]:
    """Kernels of DPLR that KDA does not launch: those in which p reads the state."""
    from fla_cp import chunk_dplr_delta_rule

    q, k, a, b = (torch.zeros(1, 64, 1, K, dtype=dtype, requires_grad=True) for _ in "qkab")
    v, gk = (torch.zeros(1, 64, 2, n, dtype=dtype, requires_grad=True) for n in (V, K))
    with launched() as kernels:
        o, _ = chunk_dplr_delta_rule(q, k, v, a, b, gk, **gate, impl="triton")
        o.float().sum().backward()
    own = "intra_kernel", "gated_kernel", "intra_bwd_kernel", "safe_bwd_kernel"
    return [k for k in dict.fromkeys(kernels) if k.kernel in own]


def of_squares(call: Callable[[], list[Launch]]) -> list[Launch]:
    """The launches of kernels that write or read T and Aqk, which change with two terms."""
    of = ("scan", "intra_kernel", "intra_sm90", "intra_head", "steep")
    return [k for k in call() if k.kernel.startswith(of)]


def compile_recurrent(
    K: int, V: int, dtype: torch.dtype, v_first: bool, columns: int = 0
) -> list[Launch]:
    """A decoding step of a layer. columns: of ssm_state_indices, with states in a pool; with
    several of them there are draft tokens."""
    from fla_cp import fused_recurrent_kda

    x = [torch.zeros(4, 1, h, d, dtype=dtype) for h, d in ((1, K), (1, K), (2, V), (2, K))]
    state = torch.zeros(4, 2, *((V, K) if v_first else (K, V)))
    pool: dict[str, torch.Tensor] = {}
    if columns:
        shape = (4, columns) if columns > 1 else (4,)
        pool["ssm_state_indices"] = torch.zeros(shape, dtype=torch.int32)
    if columns > 1:
        pool["num_accepted_tokens"] = torch.ones(4, dtype=torch.int32)
    with launched() as kernels:
        fused_recurrent_kda(
            *x,
            torch.zeros(4, 1, 2, dtype=dtype),
            A_log=torch.zeros(2),
            dt_bias=torch.zeros(2 * K),
            initial_state=state,
            inplace_final_state=True,
            state_v_first=v_first,
            **pool,
            **INSIDE,
            impl="triton",
        )
    return list(dict.fromkeys(kernels))


def compile_drafts(name: str, v_first: bool) -> list[Launch]:
    """Two draft tokens of a member with two rows a token, whose steps have no raw gate."""
    import fla_cp

    def rows(*shape: int) -> torch.Tensor:
        return torch.zeros(4, *shape, dtype=torch.bfloat16)

    K = V = 128
    if name == "gated_delta_product":
        x = [rows(2, 1, K), rows(4, 1, K), rows(4, 2, V), rows(2, 2), rows(4, 2), 2]
    else:
        x = [rows(2, 1, K), rows(2, 1, K), rows(2, 2, V), *[rows(2, 1, K)] * 2, rows(2, 2, K)]
    with launched() as kernels:
        getattr(fla_cp, f"fused_recurrent_{name}")(
            *x,
            initial_state=torch.zeros(8, 2, *((V, K) if v_first else (K, V))),
            inplace_final_state=True,
            state_v_first=v_first,
            ssm_state_indices=torch.zeros(4, 2, dtype=torch.int32),
            num_accepted_tokens=torch.ones(4, dtype=torch.int32),
            impl="triton",
        )
    return list(dict.fromkeys(kernels))


def compile_conv(dtype: torch.dtype, halo: bool) -> list[Launch]:
    """Forward and backward with four taps, SiLU and a bias; with a halo as under a context."""
    from fla_cp.kernels.torch.conv import ConvInputs, ConvRows
    from fla_cp.kernels.triton.conv import conv, conv_bwd

    x, weight, bias = (torch.zeros(*s, dtype=dtype) for s in ((256, 1000), (1000, 4), (1000,)))
    where = ConvRows.build(torch.zeros(256), (256,), 3 * halo, x.device)
    front = x.new_empty(len(where.halo), 1000)
    with launched() as kernels:
        inputs = ConvInputs(x, front, where, weight, bias, True)
        conv_bwd(inputs, conv(inputs))
    return list(dict.fromkeys(kernels))


def compile_update(dtype: torch.dtype) -> list[Launch]:
    """The convolution of one more token, of four sequences."""
    from fla_cp.kernels.triton.decoding import conv_update

    x, cache, weight = (torch.zeros(*s, dtype=dtype) for s in ((4, 1000), (4, 1000, 4), (1000, 4)))
    with launched() as kernels:
        conv_update(x, cache, weight, None, True)
    return list(dict.fromkeys(kernels))


PRODUCTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "projections": (1, 6416, 2048, ("norm",)),
    "low rank": (2, 2048, 128, ("bias",)),
    "output": (1, 2048, 2048, ("onto",)),
    "gate, up": (1, 2 * 5504, 2048, ("norm", "swiglu")),
    "down": (1, 2048, 5504, ("onto",)),
    "wide": (1, 2 * 14336, 14336, ("norm", "swiglu")),
}
"""Products of a decoding step of the 1.3B model, and a wider one: inputs, rows and columns of a
weight, and what stands around it."""


def compile_product(dtype: torch.dtype, name: str, B: int, early: bool = False) -> list[Launch]:
    """A product of one token of B sequences; of many, what is not cuBLAS's. early: it starts before
    the kernel ahead of it has ended."""
    from fla_cp.kernels.torch.decoding import StepProduct
    from fla_cp.kernels.triton import decoding
    from fla_cp.kernels.triton import early as launches

    G, R, C, parts = PRODUCTS[name]
    given = {"norm": torch.zeros(C), "bias": torch.zeros(G * R), "onto": torch.zeros(B, R)}
    more = {part: given[part].to(dtype) if part in given else True for part in parts}
    x, weight = torch.zeros(B, G * C, dtype=dtype), torch.zeros(G, R, C, dtype=dtype)
    with launched() as kernels, mock.patch.object(launches, "EARLY", early):
        decoding.step_product(StepProduct(x, weight, eps=1e-5, **more))
    return list(dict.fromkeys(kernels))


def compile_argmax(dtype: torch.dtype, N: int) -> list[Launch]:
    """The likeliest of N tokens for each of 64 sequences."""
    from fla_cp.kernels.triton.argmax import argmax

    with launched() as kernels:
        argmax(torch.zeros(64, N, dtype=dtype))
    return kernels


MIXERS = {
    "KDA": (16, 128, 128, False),
    "KDA, 64 channels": (8, 64, 64, False),
    "GDN": (16, 128, 128, True),
    "GLA": (4, 64, 128, False),
}
"""Heads, channels of keys and values, and whether there is one decay a head."""


def compile_mixer(dtype: torch.dtype, name: str) -> list[Launch]:
    """Convolution, recurrence and gated norm of one token, started early."""
    from fla_cp.kernels.torch.decoding import StepMixer
    from fla_cp.kernels.triton.step_mixer import step_mixer
    from fla_cp.rule import DeltaRule

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    H, K, V, per_head = MIXERS[name]
    D, decays, delta = H * (2 * K + V), H if per_head else H * K, name != "GLA"
    mixer = StepMixer(
        DeltaRule(
            K**-0.5,
            "softplus",
            qk_l2norm=True,
            beta_factor=1.0 if delta else None,
            per_head=per_head,
            removal="k" if delta else "none",
        ),
        zeros(1, D),
        zeros(1, D, 4),
        zeros(D, 4),
        None,
        torch.zeros(1, H, K, V),
        zeros(1, decays),
        zeros(1, H * V),
        beta=zeros(1, H) if delta else None,
        A_log=torch.zeros(H),
        dt_bias=torch.zeros(decays),
        norm=zeros(V),
        eps=1e-5,
        activation="sigmoid",
    )
    with launched() as kernels:
        step_mixer(mixer)
    return list(dict.fromkeys(kernels))


SIZES_1B = {"H": 16, "K": 128, "V": 128, "C": 2048, "F": 5504}
LAYERS: dict[str, dict] = {
    "KDA 1.3B": SIZES_1B | {"bias": True},
    "KDA 340M": {"H": 8, "K": 128, "V": 128, "C": 1024, "F": 2816},
    "GDN 1.3B": SIZES_1B | {"low": False, "rule": {"per_head": True}, "activation": "silu"},
    "GLA": {"H": 4, "K": 64, "V": 128, "C": 512, "F": 1408, "gate": False}
    | {"rule": {"removal": "none", "beta_factor": None}},
}
"""Sizes and kinds of layers that are one kernel, see `drawn_layers`."""

SEVERAL: dict[str, dict] = {
    "KDA 1.3B, 64 rows": SIZES_1B | {"B": 64, "together": True},
    "KDA 340M, 8 rows": LAYERS["KDA 340M"] | {"B": 8, "bias": True},
    "GDN 1.3B, 64 rows": LAYERS["GDN 1.3B"] | {"B": 64},
    "GLA, 16 rows": LAYERS["GLA"] | {"B": 16},
    "GDN, two value heads a head": LAYERS["GDN 1.3B"] | {"B": 32, "HV": 32, "conv_bias": True},
    "KDA, keys of 96, values of 256": SIZES_1B | {"B": 8, "K": 96, "V": 256, "conv_bias": True},
    "KDA, three taps": SIZES_1B | {"B": 8, "taps": 3},
}
"""The same for several sequences, for which a layer has a few kernels."""


def compile_layers(name: str) -> list[Launch]:
    """A step through a layer."""
    from fla_cp.kernels.sm90.step_run import step_layers
    from tests.support.step_layers import drawn_layers

    of = (LAYERS | SEVERAL)[name]
    layers = drawn_layers(1, **of)
    with launched() as kernels:
        run = step_layers(layers, 132)
        assert run is not None
        run(torch.zeros(of.get("B", 1), len(layers[0].norm), dtype=torch.bfloat16))
        for deferred in run.deferred:
            deferred.write_back()
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


def compile_norm(V: int, dtype: torch.dtype, activation: str) -> list[Launch]:
    """Forward and backward, with a gate that is part of a wider tensor."""
    from fla_cp.kernels.triton.gated_norm import gated_norm, gated_norm_bwd

    x, wide = torch.zeros(256, 2, V, dtype=dtype), torch.zeros(256, 4 * V, dtype=dtype)
    given = x, wide[:, : 2 * V].view(256, 2, V), torch.zeros(V, dtype=dtype), 1e-5, activation
    with launched() as kernels:
        gated_norm_bwd(*given, gated_norm(*given))
    return list(dict.fromkeys(kernels))


def compile_fold(K: int, V: int) -> list[Launch]:
    """A fold with entry states, in reverse, with transitions, and of the maps that ranks sent; with
    few heads and with many, whose value tiles are wider."""
    from fla_cp.comm.affine import FoldTable
    from fla_cp.kernels.triton.fold import fold
    from fla_cp.partition.packing import Packing

    steps = FoldTable((0, 1), (0,), (0,), (0,), (0,), (1,))
    packing = Packing.build((0, 64))
    with launched() as kernels:
        for HV in (2, 160):
            M, B = (torch.zeros(2, HV, K, n) for n in (K, V))
            wire = torch.zeros(2, HV, K, V + K)
            for transposed in (False, True):
                fold(packing, steps, M, B, B, B, transposed=transposed)
                fold(packing, steps, M, B, None, B, transposed=transposed)
                fold(packing, steps, M, B, None, wire, transposed=transposed)
            fold(packing, steps, wire[..., V:], wire[..., :V], None, B, transposed=False)
    return list(dict.fromkeys(kernels))


def compile_tables() -> list[Launch]:
    """The tables of a packing, from offsets of either dtype."""
    from fla_cp.kernels.triton.chunk_tables import TableFormer
    from fla_cp.kernels.triton.operands import columns
    from fla_cp.partition.whole import WholeSequences

    packing = WholeSequences.of((0, 100, 130))
    with launched() as kernels:
        for dtype in (torch.int32, torch.int64):
            given = torch.tensor(packing.given, dtype=dtype)
            TableFormer(packing.frame, given.device)(columns, packing, given, None)
    return list(dict.fromkeys(kernels))


def compile_clear(dtype: torch.dtype) -> list[Launch]:
    """The zeros of a frame's last chunks."""
    from fla_cp.kernels.triton.clear import clear

    with launched() as kernels:
        clear(torch.ones(3, 2, 16, 16, dtype=dtype), torch.ones(3, 2, 64, 16, dtype=dtype), 1)
    return list(dict.fromkeys(kernels))


def compile_clock() -> list[Launch]:
    """A wait whose times are taken inside a CUDA graph."""
    from fla_cp.kernels.triton.clock import add_wait, write_time

    sums, began, begin = (torch.zeros(n, dtype=torch.int64) for n in (2, 1, 1))
    with launched() as kernels:
        write_time(began)
        add_wait(sums, began, begin)
    return list(dict.fromkeys(kernels))


def compile_exchange(K: int, V: int) -> list[Launch]:
    """An exchange of the first, a middle and the last rank, of transitions and their transposes."""
    from fla_cp.comm import SlotMaps
    from tests.support.one_memory import Neighbours, in_line

    links, ranks, out = in_line(3), Neighbours(3, 2, K, V, "cpu"), torch.zeros(1, 2, K, V)
    M = torch.zeros(1, 2, K, K)
    with launched() as kernels:
        for transition in (M, M.mT, None):
            for rank in range(3):
                ranks.run(rank, links, SlotMaps(transition, out), out)
    return list(dict.fromkeys(kernels))


def configurations() -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """The calls that are compiled, by name.

    Each size and dtype is compiled with the tiles of the table, and each candidate tile at K = V =
    128.
    """
    from benchmarks import tune
    from benchmarks.tune import GROUPED, choice_of, forced
    from fla_cp.kernels.triton import tile_table

    for (K, V), (name, dtype) in product(SIZES, DTYPES.items()):
        for gate, options in (("safe", SAFE), ("any", {})):
            if gate == "any" or name == "bf16":  # only bf16 has a path of its own for a safe gate
                call = functools.partial(compile_call, K, V, dtype, options)
                yield f"{K}x{V} {name} {gate}", call

                call = functools.partial(compile_dplr, K, V, dtype, options)
                yield f"dplr {K}x{V} {name} {gate}", call

        call = functools.partial(compile_member, "gated_delta_rule", K, V, dtype, {})
        yield f"{K}x{V} {name} head groups", call
        call = functools.partial(compile_member, "gated_delta_rule", K, V, dtype, {}, H=2)
        yield f"{K}x{V} {name} head", call
        for layout in ("KV", "VK"):
            call = functools.partial(compile_recurrent, K, V, dtype, layout == "VK")
            yield f"recurrent {K}x{V} {name} {layout}", call
            if name == "bf16":
                for columns, kind in ((1, "pool"), (4, "drafts")):
                    given = K, V, dtype, layout == "VK", columns
                    call = functools.partial(compile_recurrent, *given)
                    yield f"recurrent {K}x{V} {name} {layout} {kind}", call
    for name, layout in product(("gated_delta_product", "dplr_delta_rule"), ("KV", "VK")):
        call = functools.partial(compile_drafts, name, layout == "VK")
        yield f"recurrent {name} bf16 {layout} drafts", call
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
            call = functools.partial(compile_dplr, K, V, torch.bfloat16, options)
            yield f"dplr {K}x{V} bf16 {gate} high", functools.partial(of_squares, call)
        for H, groups in ((1, " groups"), (2, "")):
            options = (K, V, torch.bfloat16, HIGH, H)
            call = functools.partial(compile_member, "gated_delta_rule", *options)
            yield f"{K}x{V} bf16 head{groups} high", functools.partial(of_squares, call)
    call = functools.partial(compile_member, "gla", 128, 128, torch.bfloat16, SAFE)
    yield "gla bf16 safe", call
    yield from short_chunks.configurations()
    yield "tables of a packing", compile_tables
    yield "clock", compile_clock
    for name, dtype in DTYPES.items():
        yield f"clear {name}", functools.partial(compile_clear, dtype)
    for K, V in SIZES:
        yield f"fold {K}x{V}", functools.partial(compile_fold, K, V)
        yield f"exchange {K}x{V}", functools.partial(compile_exchange, K, V)
    for name, dtype in DTYPES.items():
        for halo in (False, True):
            call = functools.partial(compile_conv, dtype, halo)
            yield f"conv {name}{' halo' * halo}", call
        for V, activation in product((64, 96, 128, 256), ("sigmoid", "silu")):
            call = functools.partial(compile_norm, V, dtype, activation)
            yield f"norm {V} {name} {activation}", call
        yield f"conv update {name}", functools.partial(compile_update, dtype)
        for part in PRODUCTS:
            call = functools.partial(compile_product, dtype, part, 1)
            yield f"decode {part} {name}", call
        call = functools.partial(compile_product, dtype, "gate, up", 5, early=True)
        yield f"decode norm, SwiGLU {name}", call
        for part in ("projections", "down"):
            call = functools.partial(compile_product, dtype, part, 1, early=True)
            yield f"decode {part} {name} early", call
        for N in (32000, 151936) if name == "bf16" else (32000,):
            yield f"decode argmax {N} {name}", functools.partial(compile_argmax, dtype, N)
        for kind in MIXERS if name == "bf16" else ("KDA",):
            call = functools.partial(compile_mixer, dtype, kind)
            yield f"decode mixer {kind} {name}", call
        for bound in (None, -5.0):
            call = functools.partial(compile_gate, dtype, bound)
            yield f"gate {name} {'softplus' if bound is None else 'sigmoid'}", call

    for kind in LAYERS | SEVERAL:
        yield f"decode layers {kind} bf16", functools.partial(compile_layers, kind)

    def head_in_triton(
        tiles: dict[str, tile_table.Tile], family: str = "gated_delta_rule"
    ) -> list[Launch]:
        with forced(tiles):
            return compile_member(family, 128, 128, torch.bfloat16, {}, H=2)

    chunks = {k[1]: t for k, t in tile_table.TABLE.items() if k[1] == "intra_head"}
    for family in ("gated_delta_rule", "comba", "simple_gla"):
        call = functools.partial(head_in_triton, chunks, family)
        yield f"{family} bf16, chunks in Triton", call

    def with_tiles(choice: dict[str, tile_table.Tile], family: str, options: dict) -> list[Launch]:
        with forced(choice):
            if family == "kda":
                return compile_call(128, 128, torch.bfloat16, options)
            return compile_member(family, 128, 128, torch.bfloat16, options)

    def local_in_triton(family: str, options: dict) -> list[Launch]:
        local = ("intra", "intra_any", "gated", "scores_bwd", "intra_bwd")
        choice = {k[1]: t for k, t in tile_table.TABLE.items() if k[1] in local}
        return with_tiles(choice, family, options)

    for family, gate in product(("kda", "gla"), ("safe", "any")):
        options = SAFE if gate == "safe" else {}
        call = functools.partial(local_in_triton, family, options)
        yield f"{family} bf16 {gate}, chunks in Triton", call
        call = functools.partial(local_in_triton, family, options | HIGH)
        yield f"{family} bf16 {gate} high, chunks in Triton", functools.partial(of_squares, call)

    call = functools.partial(compile_call, 128, 128, torch.bfloat16, {"lower_bound": -40.0})
    yield "kda bf16 any bounded", call

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
        options = {} if "_any" in stage else SAFE
        of_heads = "head" in stage or stage.endswith("_concurrent")
        of_heads |= stage.startswith("scan") and tile.folder == "sm90"
        kernels = []
        with forced(choice_of(stage.removesuffix("_concurrent"), tile)):
            if of_heads:
                H = 1 if stage in GROUPED else 2
                kernels += compile_member("gated_delta_rule", 128, 128, torch.bfloat16, {}, H=H)
            chosen = (t for _, t in tile_table.SM90_TILES.get(stage, ()))
            if stage.startswith("scan") and tile == tile_table.BROAD and tile in chosen:
                for name in ("comba", "simple_gla"):
                    kernels += compile_member(name, 128, 128, torch.bfloat16, {}, H=2)
            if stage.endswith("_own"):
                kernels += compile_dplr(128, 128, torch.bfloat16, options)
            elif "head" not in stage:
                kernels += compile_call(128, 128, torch.bfloat16, options)
        name = stage.removesuffix("_own")
        safe_bwd = name == "intra_bwd"
        name = name.removesuffix("_concurrent").removesuffix("_any")
        name = name.removesuffix("_states").removesuffix("_ends")
        name = "safe_bwd" if safe_bwd else {"scores_bwd_head": "scores_head_bwd"}.get(stage, name)
        if stage == "intra_any" and tile.folder == "sm90":
            name = "steep"
        if stage == "intra_bwd_any" and tile.folder == "sm90":
            name = "safe_bwd_any"
        if stage == "gated" and tile.folder == "sm90":
            return [k for k in kernels if "_gated_" in k.kernel]
        name += "_sm90" * (tile.folder == "sm90")
        return [k for k in kernels if k.kernel == f"{name}_kernel"]

    for stage in tune.STAGES:
        for tile in tune.candidates(stage, 128, 128):
            yield f"{stage} {tuple(tile)}", functools.partial(with_tile, stage, tile)
