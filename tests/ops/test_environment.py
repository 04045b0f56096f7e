"""Entry points give the same results for any default device, default dtype, autocast or inference
mode.

Tensors are given on the CPU; "meta" as default device stands for "cuda" too.
"""

import ast
import contextlib
import functools
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context, nn, ops, zigzag_token_ranges
from tests.support.processes import environment
from tests.support.ranks import run_threads

CU = torch.tensor([0, 3, 3, 70, 75])
OTHER = torch.tensor([0, 20, 75])
T, H, HV, K, V, W = 75, 1, 2, 4, 6, 4


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "device": lambda: default_device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp64": lambda: default_dtype(torch.float64),
    "bf16": lambda: default_dtype(torch.bfloat16),
}


def caches():
    """Every functools cache of the package: tables made by one case must not serve a later one."""
    for module in pkgutil.walk_packages(fla_cp.__path__, "fla_cp."):
        if "kernels" not in module.name:
            yield from vars(importlib.import_module(module.name)).values()


def draw(*shape, seed=0):
    gen = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float32, device="cpu")


def drawn(*shapes):
    return [draw(*shape, seed=i) for i, shape in enumerate(shapes)]


def context(group=None, **options):
    """A context of one rank, with two ranges that hand states to each other."""
    options = {"token_ranges": [[(40, T), (0, 40)]], "conv1d_kernel_size": W, **options}
    return build_cp_context(CU, group, **options)


def fixed():
    """A context of fixed shape that was first filled with another packing."""
    found = build_cp_context(OTHER, None, conv1d_kernel_size=W, max_sequences=len(CU) - 1)
    found.update(CU)
    return found


def returned(found, leaves):
    """The results of a call and, if autograd has recorded it, the gradients of `leaves`."""
    outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    differentiable = [x for x in outputs if x.requires_grad]
    grads = ()
    if differentiable:
        weights = [draw(*x.shape, seed=9).to(x.dtype) for x in differentiable]
        grads = torch.autograd.grad(differentiable, leaves, weights)
    return [x.detach() for x in (*outputs, *grads)]


SHAPES = {
    "kda": {"g": (HV, K), "beta": (HV,), "dt_bias": (HV * K,)},
    "gated_delta_rule": {"g": (HV,), "beta": (HV,), "dt_bias": (HV,)},
    "comba": {"p": (H, K), "g": (HV,), "beta": (HV,), "dt_bias": (HV,)},
    "gated_delta_product": {"g": (HV,), "beta": (HV,), "dt_bias": (HV,), "n": 2},
    "gla": {"g": (HV, K), "dt_bias": (HV * K,)},
    "simple_gla": {"g": (HV,), "dt_bias": (HV,)},
}


def operator(name, form="chunk", packing="cu_seqlens", impl="torch"):
    """A function that calls the operator with gate, norm and beta inside, and with states.

    The tensors are made here; the function makes all tables that it needs.
    """
    shapes = dict(SHAPES[name])
    n, dt_bias = shapes.pop("n", 1), draw(*shapes.pop("dt_bias"), seed=21)
    rows = [("q", (H, K), 1), ("k", (H, K), n), ("v", (HV, V), n)]
    rows += [(x, s, n if x == "beta" else 1) for x, s in shapes.items()]
    inputs = [draw(1, T * r, *s, seed=i) for i, (_, s, r) in enumerate(rows)]
    inputs += [draw(HV, seed=20), dt_bias]
    options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "impl": impl}
    if "beta" in shapes:
        options["use_beta_sigmoid_in_kernel"] = True
    states = packing != "fixed"
    if states:
        inputs.append(draw(len(CU) - 1, HV, K, V, seed=22))
        options["output_final_state"] = True
    if form == "chunk" and states and name != "gated_delta_product":
        options["return_intermediate_states"] = True
    call = getattr(ops, f"{form}_{name}" if packing == "cu_seqlens" else f"cp_{form}_{name}")

    def run():
        leaves = [x.detach().clone().requires_grad_(form == "chunk") for x in inputs]
        *tokens, A_log, dt = leaves[: len(rows) + 2]
        more = {"initial_state": leaves[-1]} if states else {}
        steps = [n] if n > 1 else []
        where = {"cu_seqlens": CU}
        if packing != "cu_seqlens":
            where = {"cp_context": fixed() if packing == "fixed" else context()}
        return returned(
            call(*tokens, *steps, A_log=A_log, dt_bias=dt, **options, **more, **where), leaves
        )

    return run


def convolution(packing, impl="torch", states=False):
    inputs = drawn((1, T, 3), (3, W), (3,))
    if states:
        rows = 3 if packing == "rows" else len(CU) - 1
        inputs.append(draw(rows, 3, W, seed=4))

    def run():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        where = {"cu_seqlens": CU}
        if packing != "cu_seqlens":
            where = {"cp_context": fixed() if packing == "fixed" else context()}
        if packing == "rows":
            where, leaves[0] = {}, leaves[0].detach().view(3, T // 3, 3).requires_grad_()
        if states:
            where |= {"initial_state": leaves[3], "output_final_state": True}
        return returned(ops.causal_conv1d(*leaves[:3], "silu", impl=impl, **where), leaves)

    return run


def attention(packing):
    inputs = drawn((1, T, HV, K), (1, T, H, K), (1, T, H, V))

    def run():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        where = {"cu_seqlens": CU}
        if packing != "cu_seqlens":
            where = {"cp_context": fixed() if packing == "fixed" else context()}
        return returned(ops.causal_attention(*leaves, **where), leaves)

    return run


def step():
    x, cache, weight = drawn((2, 3), (2, 3, W), (3, W))

    def run():
        return returned(ops.causal_conv1d_update(x, cache.clone(), None, weight), [])

    return run


def gate(name, shape, bias, impl="torch", **options):
    inputs = [draw(1, T, *shape, seed=1), draw(HV, seed=2), draw(bias, seed=3)]

    def run():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return returned(getattr(ops, name)(*leaves, impl=impl, **options), leaves)

    return run


def sharding():
    """Shards a batch and puts it together."""
    x = draw(1, T, 3)

    def run():
        leaf, c = x.detach().clone().requires_grad_(), context()
        return returned((c.shard(leaf), c.unshard(c.shard(leaf)), c.cu_seqlens), [leaf])

    return run


CALLS = {
    **{f"chunk_{n}": functools.partial(operator, n) for n in SHAPES},
    **{f"cp_chunk_{n}": functools.partial(operator, n, packing="cp") for n in SHAPES},
    **{f"fused_recurrent_{n}": functools.partial(operator, n, "fused_recurrent") for n in SHAPES},
    "update": functools.partial(operator, "kda", packing="fixed"),
    **{f"causal_conv1d {p}": functools.partial(convolution, p) for p in ("cu_seqlens", "cp")},
    "causal_conv1d rows": functools.partial(convolution, "rows"),
    **{
        f"causal_conv1d states {p}": functools.partial(convolution, p, states=True)
        for p in ("cu_seqlens", "cp", "rows")
    },
    **{
        f"causal_attention {p}": functools.partial(attention, p)
        for p in ("cu_seqlens", "cp", "fixed")
    },
    "causal_conv1d_update": lambda: step(),
    "causal_conv1d update": functools.partial(convolution, "fixed"),
    "kda_gate": lambda: gate("kda_gate", (HV, K), HV * K),
    "kda_gate bound": lambda: gate("kda_gate", (HV, K), HV * K, lower_bound=-5.0),
    "gdn_gate": lambda: gate("gdn_gate", (HV,), HV),
    "shard": sharding,
}
KERNELS = {
    "chunk_kda": functools.partial(operator, "kda", impl="triton"),
    "cp_chunk_gated_delta_rule": functools.partial(
        operator, "gated_delta_rule", packing="cp", impl="triton"
    ),
    "causal_conv1d": functools.partial(convolution, "cp", impl="triton"),
    "kda_gate": lambda: gate("kda_gate", (HV, K), HV * K, impl="triton"),
}


def under(setting, run):
    """The results in this setting, with tables made in it."""
    for x in caches():
        getattr(x, "cache_clear", lambda: None)()
    with SETTINGS[setting]() if setting else contextlib.nullcontext():
        return run()


def assert_same(found, plain):
    """Asserts equal results. found: may lack the gradients."""
    for a, b in zip(found, plain[: len(found)], strict=True):
        assert (a.device.type, a.dtype) == ("cpu", b.dtype)
        # an identical call on the same shapes, hence the same bits
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_an_entry_point_gives_the_same(name):
    run = CALLS[name]()
    plain = under(None, run)
    for setting in SETTINGS:
        found = under(setting, run)
        assert len(found) == len(plain) or setting == "inference"
        assert_same(found, plain)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.wide if "chunk" in name else ()) for name in KERNELS
])  # fmt: skip
def test_a_kernel_gives_the_same(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = KERNELS[name]()
    plain = under(None, run)
    with SETTINGS["autocast"](), SETTINGS["bf16"]():
        assert_same(under("device", run), plain)


LAYERS = {
    "kda": lambda: nn.KimiDeltaAttention(8, 1, 4),
    "gdn": lambda: nn.GatedDeltaNet(8, 1, 4),
    "comba": lambda: nn.Comba(8, 1, 4),
    "product": lambda: nn.GatedDeltaProduct(8, 1, 4),
    "gla": lambda: nn.GatedLinearAttention(8, 1, 4),
    "simple_gla": lambda: nn.SimpleGatedLinearAttention(8, 1, 4),
    "attention": lambda: nn.Attention(8, 2, 1, 4, qk_norm=True, output_gate=True),
    "mla": lambda: nn.MultiHeadLatentAttention(
        8, 2, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_the_same(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), draw(1, T, 8)
    parameters = list(layer.parameters())

    def run():
        found = []
        wheres = [{"cu_seqlens": CU}]
        if name != "product":  # a context of its own has the repeated rows
            wheres.append({"cp_context": context()})
        for where in wheres:
            leaf = x.detach().clone().requires_grad_()
            found += returned(layer(leaf, **where), [leaf, *parameters])
        return found

    plain = under(None, run)
    for setting in SETTINGS:
        if setting == "inference":
            with torch.no_grad():
                plain_there = under(None, run)
            assert_same(under(setting, run), plain_there)
        elif setting == "autocast":  # its projections are then products in bf16
            found = under(setting, run)
            assert {x.dtype for x in found} <= {torch.float32, torch.bfloat16}
            concurrent = [torch.cat([x.float().flatten() for x in xs]) for xs in (found, plain)]
            assert (concurrent[0] - concurrent[1]).norm() <= 0.05 * concurrent[1].norm()
        else:
            assert_same(under(setting, run), plain)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_made_in_fp64_keeps_its_rates_in_fp32(name):
    with default_dtype(torch.float64):
        layer = LAYERS[name]()
        y = layer(draw(1, 9, 8).double())
    rates = {"A_log", "dt_bias", "b_logit", "d"}
    for path, parameter in layer.named_parameters():
        wide = torch.float32 if path.split(".")[-1] in rates else torch.float64
        assert parameter.dtype == wide, path
    assert y.dtype == torch.float64


@pytest.mark.parametrize("made", SETTINGS)
@pytest.mark.parametrize("make", [context, fixed])
def test_a_context_is_used_elsewhere_than_it_was_made(make, made):
    """Its tables are plain tensors on the CPU: autograd saves them, and `update` writes them."""
    inputs = [*drawn((1, T, H, K), (1, T, H, K), (1, T, HV, V), (1, T, HV, K), (1, T, HV))]
    weight = draw(H * K, W)

    def run(c):
        leaves = [x.detach().clone().requires_grad_() for x in (weight, *inputs)]
        q = ops.causal_conv1d(leaves[1].flatten(2), leaves[0], cp_context=c)
        found = ops.chunk_kda(
            q.view_as(leaves[1]), *leaves[2:4], -leaves[4].abs(), leaves[5], cp_context=c
        )
        return returned(found, leaves)

    plain = under(None, lambda: run(make()))
    with SETTINGS[made]():
        elsewhere = make()
        for table in (elsewhere.cu_seqlens, elsewhere.cu_seqlens_cpu, *elsewhere.handle):
            assert table.device.type == "cpu"
            assert not table.is_inference()
    assert_same(under(None, lambda: run(elsewhere)), plain)
    outside = make()
    assert_same(under(made, lambda: run(outside)), plain)
    if make is fixed:  # inside first, where the tables are made; then filled and used outside
        with SETTINGS[made]():
            outside.update(OTHER)
        outside.update(CU)
        assert_same(under(None, lambda: run(outside)), plain)


def ranks(group, rank, setting):
    """States, halo, keys and values and unsharding between ranks."""
    inputs = drawn((1, T, H, K), (1, T, H, K), (1, T, HV, V), (1, T, HV, K), (1, T, HV))
    weight = draw(H * K, W)

    def run():
        c = context(group, token_ranges=zigzag_token_ranges(T, 2), check=True)
        leaves = [c.shard(x).detach().requires_grad_() for x in inputs]
        q = ops.causal_conv1d(leaves[0].flatten(2), weight, cp_context=c).view_as(leaves[0])
        o, final = ops.chunk_kda(
            q, *leaves[1:3], -leaves[3].abs(), leaves[4], cp_context=c, output_final_state=True
        )
        each = [
            ops.causal_attention(*[leaves[2]] * 3, cp_context=c, exchange=exchange)
            for exchange in ("gathered", "by_heads", "ring")
        ]
        return returned((o, final, c.unshard(o), *each), leaves)

    plain = run()
    with SETTINGS[setting]():
        assert_same(run(), plain)


@pytest.mark.parametrize("setting", ["device", "inference", "autocast"])
def test_ranks_give_the_same(setting):
    run_threads(ranks, 2, setting)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_gives_the_same():
    x, weight = draw(1, T, 3), draw(3, W)
    inputs = [*drawn((1, T, H, K), (1, T, H, K), (1, T, HV, V), (1, T, HV, K), (1, T, HV))]
    c = context()

    def call(x, *inputs):
        y = ops.causal_conv1d(x, weight, cp_context=c)
        return y, ops.chunk_kda(*inputs, use_qk_l2norm_in_kernel=True, cp_context=c)[0]

    inputs[3] = -inputs[3].abs()
    plain = call(x, *inputs)
    torch._dynamo.reset()
    with SETTINGS["autocast"](), SETTINGS["fp64"](), SETTINGS["device"]():
        assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(x, *inputs), plain)


MAKERS = {"tensor", "as_tensor", "arange", "empty", "zeros", "ones", "full", "eye", "linspace"}


def test_every_tensor_that_the_package_makes_says_where():
    """Every call that makes a tensor names its device, and its dtype if torch would take the
    default one. Layers follow the defaults.
    """
    package = Path(fla_cp.__file__).parent
    for file in package.rglob("*.py"):
        if file.parent.name == "nn":
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made)):
                    if made not in MAKERS:
                        continue
                    given = {k.arg for k in call.keywords}
                    where = f"{file.relative_to(package)}:{call.lineno} torch.{made}"
                    assert "device" in given, where
                    assert made in ("tensor", "as_tensor", "arange") or "dtype" in given, where


FLAT = """
import atexit, weakref
import torch, torch.distributed as dist
seen = []
atexit.register(lambda: print("held" if seen[0]() is not None else "free"))  # the last to run
import fla_cp, fla_cp.nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
offsets = torch.tensor([0, 40, 70])
context = fla_cp.build_cp_context(offsets, dist.new_group([0]), conv1d_kernel_size=4)
seen.append(weakref.ref(context.group))
layer = fla_cp.nn.KimiDeltaAttention(32, 2, head_dim=16)
loss = layer(torch.randn(1, 70, 32), cp_context=context).sum()
loss.backward()
layer.cycle = [layer, context]
dist.destroy_process_group()
"""


def test_a_script_without_functions_gives_its_group_back():
    """A gloo group that lives until the interpreter's end aborts some of the processes."""
    done = subprocess.run(
        [sys.executable, "-c", FLAT], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "free\n"
