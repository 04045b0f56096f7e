"""docs/coming-from-fla.md says which arguments of FLA are ignored and refused."""

import ast
import inspect
import re
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from fla_cp import compat, nn
from tests.support.closeness import assert_exact
from tests.support.fla_record import RECORD, find
from tests.support.members import BY_NAME, F64, Call, draw

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-fla.md").read_text()


def rows(heading):
    """The cells of the table below a heading, without its first row and the rule line."""
    section = re.split(r"^## ", PAGE.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    lines = re.findall(r"^\|(.*)\|$", section, flags=re.M)[2:]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def pairs(heading):
    return [(row[0].strip(" `"), row[1].strip(" `")) for row in rows(heading)]


def operands(name, **more):
    x, _, _ = draw(BY_NAME[name], Call(T=70, HV=2))
    return x | more


def convolution(**more):
    gen = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=gen, dtype=F64) for s in ((1, 9, 6), (6, 4)))
    return {"x": x, "weight": weight} | more


def layer(**options):
    torch.manual_seed(0)
    return compat.ShortConvolution(6, 4, dtype=F64, **options)


X = convolution()["x"]
RULE = operands("gated_delta_rule")
DELTA = {n: t for n, t in RULE.items() if n != "g"}
DPLR = operands("dplr_delta_rule")
NORM = compat.FusedRMSNormGated(6, dtype=F64)

CALLS = {
    "chunk_kda": lambda **o: compat.chunk_kda(**operands("kda"), **o),
    "chunk_gated_delta_rule": lambda **o: compat.chunk_gated_delta_rule(**RULE, **o),
    "chunk_delta_rule": lambda **o: compat.chunk_delta_rule(**DELTA, **o),
    "chunk_dplr_delta_rule": lambda **o: compat.chunk_dplr_delta_rule(**DPLR, **o),
    "chunk_rwkv7": lambda **o: compat.chunk_rwkv7(
        **{{"q": "r", "gk": "w"}.get(n, n): t for n, t in DPLR.items()}, **o
    ),
    "chunk_simple_gla": lambda **o: compat.chunk_simple_gla(**operands("simple_gla"), **o),
    "fused_recurrent_gated_delta_rule": lambda **o: compat.fused_recurrent_gated_delta_rule(
        **(RULE | o), A_log=torch.zeros(2), use_gate_in_kernel=True
    ),
    "fused_recurrent_kda": lambda **o: compat.fused_recurrent_kda(**(operands("kda") | o)),
    "fused_recurrent_kda_fwd": lambda **o: compat.fused_recurrent_kda_fwd(
        **(operands("kda") | o), inplace_final_state=False
    ),
    "fused_recurrent_delta_rule": lambda **o: compat.fused_recurrent_delta_rule(**(DELTA | o)),
    "fused_recurrent_comba": lambda **o: compat.fused_recurrent_comba(**operands("comba", **o)),
    "fused_recurrent_gla": lambda **o: compat.fused_recurrent_gla(
        **{"gk" if n == "g" else n: t for n, t in operands("gla").items()}, **o
    ),
    "fused_recurrent_simple_gla": lambda **o: compat.fused_recurrent_simple_gla(
        **operands("simple_gla"), **o
    ),
    "causal_conv1d": lambda **o: compat.causal_conv1d(**(convolution() | o)),
    "ShortConvolution": lambda **o: layer(**o)(X),
    "ShortConvolution.forward": lambda **o: layer()(X, **o),
    "FusedRMSNormGated": lambda **o: (compat.FusedRMSNormGated(6, **o)(X, X),),
    "FusedRMSNormGated.forward": lambda **o: (NORM(X, X, **o),),
    "build_cp_context": lambda **o: compat.build_cp_context(torch.tensor([0, 9]), None, **o),
}


def stepped(**options):
    with torch.no_grad():
        return layer().step(X, None, None, **options)


CALLS["ShortConvolution.step"] = stepped

ANY = {"max_num_seqs": 3, "use_fast_conv1d": True, "residual_in_fp32": True}
ANY |= {name: torch.zeros(2, dtype=torch.int64) for name in ("chunk_indices", "cu_seqlens")}

OTHER = {
    "use_tf32x3_affine_chain": False,
    "use_graph": True,
    "reverse": True,
    "weight": None,
    "elementwise_affine": False,
    "prenorm": True,
    "beta": torch.rand(1, 70, 2, 8, dtype=F64),
    **{name: torch.zeros(1, dtype=F64) for name in ("gv", "gk", "seq_idx", "residual")},
}


@pytest.mark.parametrize(
    "function, argument, values", [r[:3] for r in rows("Accepted and ignored")]
)
def test_ignored_arguments_change_nothing(function, argument, values):
    function, argument = function.strip("`"), argument.strip("`")
    listed = [ANY[argument]] if values == "any" else [v.strip(" `") for v in values.split(",")]
    call = CALLS[function]
    expected = call()[0].detach()
    for value in listed:
        if isinstance(value, str) and value[0] in "N0123456789":
            value = ast.literal_eval(value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if argument == "use_fast_conv1d" else "error")
            assert_exact(argument, call(**{argument: value})[0].detach(), expected)


@pytest.mark.parametrize("function, argument", pairs("Refused"))
def test_refused_arguments_are_named(function, argument):
    CALLS[function]()
    with pytest.raises(ValueError, match=f"^{argument} must be "):
        CALLS[function](**{argument: OTHER[argument]})


def unread(name):
    """The arguments in a function's signature that its body deletes or never reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(find(name)))).body[0]
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    return [a.arg for a in tree.args.args if a.arg not in (*read, "self")]


@pytest.mark.parametrize("name", RECORD)
def test_every_argument_that_is_not_read_is_documented(name):
    if find(name).__name__ != name.split(".")[-1] and "." not in name:
        return  # another name, or a class: below, under its own
    documented = {
        argument for function, argument in pairs("Accepted and ignored") if function == name
    }
    assert set(unread(name)) <= documented


def test_every_use_of_refuse_is_documented():
    folder = Path(inspect.getfile(compat)).parent
    refused = set()
    for path in folder.glob("*.py"):
        refused |= set(re.findall(r'\brefuse\("(\w+)"', path.read_text()))
    assert refused <= {argument for _, argument in pairs("Refused")}
    assert len(refused) >= 8


def test_every_name_is_listed_with_its_place_in_fla():
    listed = {}
    for places, names in rows("Names"):
        for name in re.findall(r"`(\w+)`", names):
            listed[name] = re.findall(r"`([\w.]+)`", places)
    assert set(listed) == set(compat.__all__)
    for name, places in listed.items():
        module = RECORD.get(name, {"module": "fla.ops.cp.context"})["module"]
        module = module.replace("modules.causal_conv1d", "modules").replace(
            "modules.norm", "modules"
        )
        assert any(module.startswith(place) for place in places), (name, module)


def test_the_examples_run():
    operators, layers = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    found = {}
    exec(operators, found)
    assert found["o"].shape == (1, 12, 2, 8)
    exec(layers, {})


def test_keywords_of_layers_are_those_of_the_package_or_refused():
    """Names on the left of the table that a layer here does not take are refused by class."""
    of_fla, here = (" ".join(column) for column in zip(*rows("Layers"), strict=True))
    for name in ("GatedDeltaNet", "KimiDeltaAttention"):
        layer = getattr(nn, name)
        taken = inspect.signature(layer).parameters
        for old in ("expand_v", "mode", "use_short_conv", "conv_bias", "use_gate"):
            assert f"`{old}`" in of_fla and old not in taken
            with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) .*'{old}'$"):
                layer(64, 2, 16, **{old: 1})
        assert "`head_v_dim`" in here and "head_v_dim" in taken
        called = inspect.signature(layer.forward).parameters
        for old in ("hidden_states", "attention_mask", "past_key_values", "use_cache"):
            assert old in of_fla and old not in called
        kept = dict(layer(64, 2, 16).named_parameters())
        assert {"core.A_log", "core.dt_bias", "qkv_conv.weight"} <= kept.keys()
        assert kept["qkv_conv.weight"].shape == (3 * 32, 4)
