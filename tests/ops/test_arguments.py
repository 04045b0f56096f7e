"""Arguments of a wrong kind: every entry point refuses them before anything runs."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fla_cp
from fla_cp import build_cp_context, nn
from fla_cp.ops.options import ChunkOptions, Options, RecurrentOptions

B, T, H, HV, K, V, W, N = 1, 6, 2, 4, 3, 5, 4, 2
OFFSETS = {"cu_seqlens": None, "cu_seqlens_cpu": None}
CONTEXT = build_cp_context(torch.tensor([0, T]), None, conv1d_kernel_size=W)


def shapes(name):
    """Shapes of the tensors that an entry takes first, in its order."""
    if name.endswith(("dplr_delta_rule", "rwkv7")):
        named = (
            ("q", "k", "v", "a", "b", "gk") if "dplr" in name else ("r", "w", "k", "v", "a", "b")
        )
        own = {"v": (B, T, HV, V), "gk": (B, T, HV, K), "w": (B, T, HV, K)}
        return {n: own.get(n, (B, T, H, K)) for n in named}
    per_head = "kda" not in name and not name.endswith("chunk_gla") and "recurrent_gla" not in name
    rows = N if "product" in name else 1
    found = {"q": (B, T, H, K), "k": (B, T * rows, H, K), "v": (B, T * rows, HV, V)}
    if "comba" in name:
        found["p"] = (B, T, H, K)
    found["g"] = (B, T, HV) if per_head else (B, T, HV, K)
    if not name.endswith("gla"):
        found["beta"] = (B, T * rows, HV)
    return found


def entries():
    """name -> (function, valid arguments, names of the required tensors, flags)."""
    found = {}
    for name in fla_cp.ops.__all__:
        op = getattr(fla_cp, name)
        if "gate" in name and "chunk" not in name and "recurrent" not in name:
            g = (T, HV, K) if name == "kda_gate" else (T, HV)
            rates = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(g[1:]).flatten()}
            required = ["g"] if name == "kda_gate" else ["g", "A_log"]
            found[name] = op, {"g": torch.zeros(g), **rates}, required, []
            continue
        if name == "causal_conv1d":
            good = {"x": torch.zeros(B, T, 3), "weight": torch.zeros(3, W), "bias": torch.zeros(3)}
            good |= {"residual": torch.zeros(B, T, 3), "initial_state": torch.zeros(B, 3, W)}
            found[name] = op, {**good, **OFFSETS}, ["x", "weight"], []
            continue
        if name == "causal_conv1d_update":
            good = {"x": torch.zeros(2, 3), "cache": torch.zeros(2, 3, W)}
            good |= {"weight": torch.zeros(3, W), "bias": torch.zeros(3)}
            found[name] = op, {**good, "residual": torch.zeros(2, 3)}, ["x", "cache", "weight"], []
            continue
        if name == "causal_attention":
            sizes = {"q": (B, T, HV, K), "k": (B, T, H, K), "v": (B, T, H, V)}
            good = {n: torch.zeros(s) for n, s in sizes.items()}
            found[name] = op, {**good, "cu_seqlens": None}, list(sizes), []
            continue
        good = {n: torch.zeros(s) for n, s in shapes(name).items()}
        required = list(good)
        if "product" in name:
            good["num_householder"] = N
        gates = 1 if "g" in good and good["g"].ndim == 3 else K
        good |= {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * gates)}
        good |= {"initial_state": torch.zeros(B, HV, K, V), "use_gate_in_kernel": True}
        flags = ["use_gate_in_kernel", "output_final_state", "use_exp2"]
        flags += [] if "a" in good else ["use_qk_l2norm_in_kernel"]
        flags += ["inplace_final_state"] if "recurrent" in name else ["disable_recompute"]
        if "beta" in good:
            flags += ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
        if name.startswith("cp_"):
            good["cp_context"] = CONTEXT
        else:
            good |= OFFSETS
        found[name] = op, good, required, flags
    return found


ENTRIES = entries()


def quietly(make):
    """torch warns once that some kinds of tensors are prototypes."""

    def made(like):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(like)

    return made


NO_TENSORS = {
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "string": lambda x: "zeros",
    "number": lambda x: 0.0,
    "coo": lambda x: x.to_sparse(),
    "csr": quietly(lambda x: torch.eye(3).to_sparse_csr()),
    "nested": quietly(lambda x: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])),
}


class NothingRuns(TorchDispatchMode):
    """Fails on any operator of torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        pytest.fail(f"{func} ran")


def refused(op, good, name, bad, message):
    with pytest.raises(ValueError, match=message), NothingRuns():
        op(**{**good, name: bad})


@pytest.mark.parametrize("name", ENTRIES)
def test_tensors_that_are_not_dense(name):
    op, good, required, _ = ENTRIES[name]
    op(**good)
    optional = ("A_log", "dt_bias", "initial_state", "bias", "residual", *OFFSETS)
    for argument in (*required, *(n for n in optional if n in good)):
        like = torch.tensor([0, T]) if good[argument] is None else good[argument]
        given = {**good, "cu_seqlens": torch.tensor([0, T])} if "_cpu" in argument else good
        for make in NO_TENSORS.values():
            refused(op, given, argument, make(like), f"^{argument} must be a (dense )?tensor, got")
    for argument in required:
        refused(op, good, argument, None, f"^{argument} must be a tensor, got None")


@pytest.mark.parametrize("name", ENTRIES)
def test_integers_and_complex_numbers(name):
    op, good, required, _ = ENTRIES[name]
    for dtype in (torch.int64, torch.bool, torch.complex64):
        floats = [n for n, x in good.items() if isinstance(x, torch.Tensor)]
        for argument in floats:
            refused(op, good, argument, torch.ones(good[argument].shape, dtype=dtype), argument)
        alike = {n: torch.ones(good[n].shape, dtype=dtype) for n in required}
        with pytest.raises(ValueError, match=r"must be bf16, fp16, fp32 or fp64|must be fp32"):
            op(**{**good, **alike})


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e[3]])
@pytest.mark.parametrize("bad", ["yes", 1, None, 0.0, [], torch.tensor(True)], ids=repr)
def test_flags(name, bad):
    op, good, _, flags = ENTRIES[name]
    for flag in flags:
        refused(op, good, flag, bad, f"^{flag} must be True or False, got")


BAD_SCALES = {
    "string": "0.5",
    "bool": True,
    "list": [0.5],
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 1j,
    "vector": torch.ones(1),
    "per head": torch.ones(HV),
    "leaf": torch.ones((), requires_grad=True),
    "mask": torch.tensor(True),
    "array": np.ones(2),
}


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e[3]])
def test_scales(name):
    op, good, _, _ = ENTRIES[name]
    for bad in BAD_SCALES.values():
        refused(op, good, "scale", bad, "^scale must be")


BAD_BOUNDS = ["-5", True, [-5.0], -float("inf"), float("nan"), torch.tensor(-5.0), np.ones(1), -1j]


@pytest.mark.parametrize("name", ENTRIES)
def test_lower_bounds(name):
    op, good, _, _ = ENTRIES[name]
    has_bound = name.endswith(("kda", "gla", "kda_gate", "dplr_delta_rule", "rwkv7"))
    has_bound &= "simple" not in name
    if not has_bound:
        with pytest.raises(TypeError, match="unexpected keyword argument 'lower_bound'"):
            op(**good, lower_bound=-5.0)
        return
    for bad in BAD_BOUNDS:
        refused(op, good, "lower_bound", bad, "^lower_bound must be")
    assert torch.equal(first(op(**good, lower_bound=-5)), first(op(**good, lower_bound=-5.0)))


def first(found):
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", [n for n in ENTRIES if "product" in n])
@pytest.mark.parametrize("bad", [None, 0, -1, 1.5, 2.0, True, "2", [2], torch.tensor(2)], ids=repr)
def test_householder_steps(name, bad):
    op, good, _, _ = ENTRIES[name]
    refused(op, good, "num_householder", bad, "^num_householder must be an integer from 1, got")


def test_exchanges_of_keys_and_values():
    op, good, _, _ = ENTRIES["causal_attention"]
    for bad in (None, 1, "heads", ["ring"], np.array(["ring"]), torch.ones(2)):
        with pytest.raises(
            ValueError, match=r"^exchange must be 'auto', 'gathered', 'by_heads' or"
        ):
            op(**good, exchange=bad)


@pytest.mark.parametrize("name", [n for n in ENTRIES if n != "causal_attention"])
def test_implementations(name):
    op, good, _, _ = ENTRIES[name]
    for bad in (None, 1, "cuda", ["auto"], np.array(["auto"]), torch.ones(2)):
        with pytest.raises(ValueError, match=r"^impl must be 'auto', 'torch' or 'triton', got"):
            op(**good, impl=bad)


@pytest.mark.parametrize("name", [n for n in ENTRIES if not re.search("gate$|recurrent|update", n)])
def test_contexts(name):
    op, good, _, _ = ENTRIES[name]
    for bad in ("group", 1, [0, T], torch.tensor([0, T]), {}):
        refused(op, good, "cp_context", bad, "^cp_context must be a FLACPContext")


@pytest.mark.parametrize("bad", ["relu", True, 1, torch.nn.SiLU(), torch.ones(2), np.ones(2)])
def test_activations(bad):
    op, good, _, _ = ENTRIES["causal_conv1d"]
    refused(op, good, "activation", bad, "^activation must be None, 'silu' or 'swish', got")


def test_numbers_that_are_taken():
    op, good, _, _ = ENTRIES["chunk_kda"]
    good = {**good, "q": torch.ones(B, T, H, K), "k": torch.ones(B, T, H, K)}
    good |= {"v": torch.ones(B, T, HV, V), "beta": torch.ones(B, T, HV)}
    exact = op(**good, scale=2.0)[0]
    assert exact.any()
    for scale in (2, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0), torch.tensor(2)):
        assert torch.equal(op(**good, scale=scale)[0], exact)


@pytest.mark.parametrize("name", [n for n in ENTRIES if n.startswith("chunk_")])
def test_a_tensor_as_scale_is_read_at_each_call(name):
    """Calls that are alike but for its value were once taken for one."""
    op, good, _, _ = ENTRIES[name]
    good = {n: t + 0.5 if isinstance(t, torch.Tensor) else t for n, t in good.items()}
    for scale in (2.0, 3.0):
        expected = op(**good, scale=scale)[0]
        assert expected.any() and op(**good, scale=torch.tensor(scale))[0].equal(expected)
    learnt = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match="that requires no gradient"):
        op(**good, scale=learnt)


def test_a_tensor_as_scale_under_compile():
    op, good, _, _ = ENTRIES["chunk_kda"]
    run = torch.compile(lambda s: op(**good, scale=s)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"scale must be a float under torch.compile"):
        run(torch.tensor(2.0))


@pytest.mark.parametrize("extra", ["p", "rows"])
def test_keywords_of_another_member(extra):
    """The gated delta rule once accepted `p`, which it does not have, and read it in place of k."""
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        op, good, _, _ = ENTRIES[name]
        with pytest.raises(TypeError, match=extra):
            op(**good, **{extra: torch.zeros(B, T, H, K)})


@pytest.mark.parametrize("name", [n for n in ENTRIES if "product" in n])
def test_a_product_checks_all_before_its_gate_runs(name):
    """Here the gate of the raw g is a separate operator."""
    op, good, _, _ = ENTRIES[name]
    refused(op, good, "initial_state", torch.zeros(9), "initial_state must have shape")
    refused(op, good, "A_log", torch.zeros(HV + 1), "A_log must have shape")
    refused(op, good, "beta", torch.zeros(B, T, HV), "beta must have 2 rows for each")
    refused(op, good, "impl", "cuda", "impl must be")


def test_gates_on_another_device():
    for name in ("kda_gate", "gdn_gate"):
        op, good, _, _ = ENTRIES[name]
        for argument in ("A_log", "dt_bias"):
            far = good[argument].to("meta")
            refused(op, good, argument, far, f"{argument} must be on g's device cpu, got meta")


LAYERS = {
    "KimiDeltaAttention": {},
    "GatedDeltaNet": {},
    "Comba": {},
    "GatedDeltaProduct": {},
    "GatedLinearAttention": {},
    "SimpleGatedLinearAttention": {},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_before_a_projection_runs(name):
    layer = getattr(nn, name)(8, 2, 4)
    x = torch.zeros(1, T, 8)
    for bad in (None, x.tolist(), x.numpy(), "x", x[0], x[..., :7]):
        refused(layer.forward, {"x": bad}, "x", bad, "^x must be")
    for bad in ("group", 1, [0, T]):
        refused(layer.forward, {"x": x}, "cp_context", bad, "^cp_context must be a FLACPContext")
        refused(layer.forward, {"x": x}, "cu_seqlens", bad, "^cu_seqlens must be a tensor")


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_of_layers(name):
    make = getattr(nn, name)
    good = inspect.signature(nn.KimiDeltaAttention).parameters
    assert {"num_v_heads", "head_v_dim", "conv_size"} <= good.keys()
    for argument in ("num_v_heads", "head_v_dim", "conv_size"):
        for bad in (0, -2, 2.0, True, "2"):
            with pytest.raises(ValueError, match=f"{argument} must be an integer from 1[ ,].*got"):
                make(8, 2, 4, **{argument: bad})
    for at, argument in enumerate(("hidden_size", "num_heads", "head_dim")):
        for bad in (0, 2.0, None, "2"):
            sizes = [8, 2, 4]
            sizes[at] = bad
            with pytest.raises(ValueError, match=f"{argument} must be an integer from 1[ ,].*got"):
                make(*sizes)
    with pytest.raises(ValueError, match="impl must be 'auto', 'torch' or 'triton', got 'cuda'"):
        make(8, 2, 4, impl="cuda")
    with pytest.raises(ValueError, match="allow_neg_eigval must be True or False, got 1"):
        make(8, 2, 4, allow_neg_eigval=1)


@pytest.mark.parametrize("name", LAYERS)
def test_errors_about_arguments_name_the_layer_that_was_called(name):
    make = getattr(nn, name)
    for sizes, more, wrong in (
        ((8, 2, 4), {"expand_v": 1}, "unexpected keyword argument 'expand_v'"),
        ((8, 2, 4), {"rows": 2}, "unexpected keyword argument 'rows'"),
        ((8,), {}, "missing 1 required positional argument: 'num_heads'"),
        ((8, 2, 4, 4), {}, "takes from 3 to 4 positional arguments but 5 were given"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) .*{wrong}$"):
            make(*sizes, **more)

    class Own(make):
        pass

    with pytest.raises(TypeError, match=r"Own\.__init__\(\) .*'mode'$"):
        Own(8, 2, 4, mode="chunk")
    assert inspect.signature(Own) == inspect.signature(make)


def test_more_of_layers():
    for bad in (None, 0, 1.5, True):
        with pytest.raises(ValueError, match="num_householder must be an integer from 1, got"):
            nn.GatedDeltaProduct(8, 2, 4, num_householder=bad)
    for bad in (0.0, 1.0, -6.0, float("nan"), "-5", torch.tensor(-5.0)):
        with pytest.raises(ValueError, match="gate_lower_bound must be"):
            nn.KimiDeltaAttention(8, 2, 4, gate_lower_bound=bad)
        with pytest.raises(ValueError, match="gate_lower_bound must be"):
            nn.KDACore(2, 4, gate_lower_bound=bad)
    for bad in (0, "4", 2.5):
        with pytest.raises(ValueError, match="kernel_size must be an integer from 1, got"):
            nn.ShortConvolution(8, bad)
    for bad in (None, [1.0], np.zeros(3)):
        with pytest.raises(ValueError, match="x must be a tensor, got"):
            nn.ShortConvolution(8)(bad)


def test_keywords_are_declared_and_documented():
    """What type checkers know, what a call takes, and what docstrings say with its default."""
    chunk, recurrent = ChunkOptions.__annotations__, RecurrentOptions.__annotations__
    assert {*chunk, *recurrent} == {*Options._fields}
    for name, default in Options._field_defaults.items():
        operator = fla_cp.chunk_kda if name in chunk else fla_cp.fused_recurrent_kda
        assert f"{name}={default!r}".replace("'", '"') in operator.__doc__
