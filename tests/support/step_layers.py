"""Layers of a decoding step for the tests and checks of the kernel that runs them together."""

from __future__ import annotations

from typing import Any

import torch

from fla_cp.kernels import TORCH
from fla_cp.kernels.torch.decoding import StepLayer, StepMixer, StepProduct, StepRun
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_within_budget


def drawn_layers(count: int, device: str = "cpu", **given: Any) -> list[StepLayer]:
    """Layers in bf16 with what stays fp32 in it. given: sizes H, K, V, C and F; low: whether decays
    or gates are of low rank at all; gate: whether the gate is; bias: whether it has a bias; rule:
    options of the rule; activation: of the gate; B: sequences; together: whether both matrices of
    low ranks lie side by side; taps: of the convolution; conv_bias: whether it has a bias; HV:
    value heads, if they are more than H."""
    of = {"H": 2, "K": 32, "V": 32, "C": 48, "F": 40, "low": True, "gate": True, "bias": False}
    of |= {"B": 1, "together": False, "taps": 4, "conv_bias": False}
    of |= given
    HV = of.get("HV", of["H"])
    gen = torch.Generator(device).manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device=device) * scale

    def half(*size: int, scale: float = 1.0) -> torch.Tensor:
        return draw(*size, scale=scale).to(torch.bfloat16)

    H, K, V, C, F = of["H"], of["K"], of["V"], of["C"], of["F"]
    rule = {"gate": "softplus", "qk_l2norm": True, "beta_factor": 1.0} | of.get("rule", {})
    D, per_head = 2 * H * K + HV * V, rule.get("per_head", False)
    low_gate = of["low"] and of["gate"]
    gate, decay = D, D + (V if low_gate else HV * V)
    beta = decay + (HV if per_head else V)
    layers = []
    for _ in range(count):
        decay_up = None if per_head else half(HV * K, V, scale=V**-0.5)
        gate_up = half(HV * V, V, scale=V**-0.5) if low_gate else None
        layers.append(
            StepLayer(
                rule=DeltaRule(K**-0.5, **rule),
                norm=half(C),
                eps=1e-5,
                into=half(beta + HV, C, scale=C**-0.5),
                window=half(of["B"], D, of["taps"]),
                taps=half(D, of["taps"]),
                bias=half(D) if of["conv_bias"] else None,
                state=draw(of["B"], HV, K, V),
                decay=decay,
                decay_up=decay_up,
                gate=gate,
                gate_up=gate_up,
                gate_bias=half(HV * V) if of["bias"] else None,
                beta=beta if rule["beta_factor"] else None,
                A_log=draw(HV) / 4,
                dt_bias=draw(HV if per_head else HV * K) - 1,
                o_norm=half(V),
                o_eps=1e-5,
                activation=of.get("activation", "sigmoid"),
                out=half(C, HV * V, scale=(HV * V) ** -0.5),
                ffn_norm=half(C),
                ffn_eps=1e-5,
                up=half(2 * F, C, scale=C**-0.5),
                down=half(C, F, scale=F**-0.5),
            )
        )
    return [side_by_side(s) for s in layers] if of["together"] else layers


def side_by_side(s: StepLayer) -> StepLayer:
    """The layer with both matrices of low ranks side by side in memory."""
    assert s.gate_up is not None and s.decay_up is not None
    gate_up, decay_up = torch.stack([s.gate_up, s.decay_up])
    return s._replace(gate_up=gate_up, decay_up=decay_up)


def doubled(layer: StepLayer) -> StepLayer:
    return StepLayer(*(t.double() if isinstance(t, torch.Tensor) else t for t in layer))


def assert_steps_are_right(
    run: StepRun,
    layers: list[StepLayer],
    plain: list[StepLayer],
    exact: list[StepLayer],
    steps: int = 2,
) -> None:
    """Steps of `run`, which has `layers`, against the stages of the torch backend in bf16 and in
    fp64, with the windows and states that they leave."""
    gen = torch.Generator().manual_seed(1)
    for n in range(steps):
        x = torch.randn(len(layers[0].state), layers[0].norm.numel(), generator=gen)
        x = x.to(torch.bfloat16)
        y, e = x.clone(), x.double()
        run(x)
        for a, b in zip(plain, exact, strict=True):
            step(a, y)
            step(b, e)
        assert_within_budget(f"x after step {n}", x, e, y, factor=4.0)
    for deferred in run.deferred:
        deferred.write_back()
    for a, b, c in zip(layers, exact, plain, strict=True):
        assert_within_budget("state", a.state, b.state, c.state, factor=4.0)
        assert_within_budget("window", a.window, b.window, c.window, factor=4.0)


def step(s: StepLayer, x: torch.Tensor) -> None:
    """A layer in the stages of the torch backend."""
    HV, _, V = s.state.shape[1:]
    into = TORCH.step_product(StepProduct(x, s.into[None], s.norm, s.eps))

    def part(start: int, up: torch.Tensor | None, bias: torch.Tensor | None, size: int) -> Any:
        if up is None:
            return into[:, start : start + size]
        return TORCH.step_product(
            StepProduct(into[:, start : start + up.shape[1]], up[None], bias=bias)
        )

    o = TORCH.step_mixer(
        StepMixer(
            rule=s.rule,
            qkv=into[:, : s.window.shape[1]],
            window=s.window,
            taps=s.taps,
            bias=s.bias,
            state=s.state,
            decay=part(s.decay, s.decay_up, None, HV),
            gate=part(s.gate, s.gate_up, s.gate_bias, HV * V),
            beta=None if s.beta is None else into[:, s.beta : s.beta + HV],
            A_log=s.A_log,
            dt_bias=s.dt_bias,
            norm=s.o_norm,
            eps=s.o_eps,
            activation=s.activation,
        )
    )
    TORCH.step_product(StepProduct(o, s.out[None], onto=x))
    y = StepProduct(x, s.up[None], s.ffn_norm, s.ffn_eps, swiglu=True)
    TORCH.step_product(StepProduct(TORCH.step_product(y), s.down[None], onto=x))
