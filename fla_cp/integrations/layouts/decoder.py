"""What the layouts read off a decoder, and parts of it that all of them store alike.

A decoder is a module like `fla_cp.train.model.Decoder`: an embedding, blocks, a norm and a head. A
block has mixer_norm, mixer, ffn_norm and ffn. It may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fla_cp.integrations.layouts.table import Run, Table
from fla_cp.nn import Experts, RMSNorm, SwiGLU

_Module = TypeVar("_Module", bound=nn.Module)


def need(right: bool, model: str, where: str, rule: str, got: object) -> None:
    """Raises ValueError for what a published model cannot express."""
    if not right:
        raise ValueError(f"to be stored as {model}, {where} must {rule}, got {got}")


def mixers_of(decoder: Any, kind: type[_Module]) -> dict[int, _Module]:
    """The mixers of one kind by the number of their block."""
    found = enumerate(block.mixer for block in decoder.blocks)
    return {i: mixer for i, mixer in found if isinstance(mixer, kind)}


def experts_of(decoder: Any) -> dict[int, Experts]:
    """The mixtures of experts by the number of their block."""
    found = enumerate(block.ffn for block in decoder.blocks)
    return {i: ffn for i, ffn in found if isinstance(ffn, Experts)}


def is_tied(decoder: Any) -> bool:
    return decoder.head.weight is decoder.embedding.weight


def norm_eps(decoder: Any, model: str, *others: nn.Module) -> float:
    """That of all norms but `others`. Raises ValueError if they differ, since there is one for all
    in a published configuration."""
    norms = [m for m in decoder.modules() if isinstance(m, (nn.RMSNorm, RMSNorm))]
    found = {m.eps for m in norms if not any(m is other for other in others)}
    need(len(found) == 1, model, "all norms", "have the same eps", sorted(map(str, found)))
    (eps,) = found
    assert eps is not None
    return eps


def common_config(decoder: Any, eps: float) -> dict[str, Any]:
    """What config.json says of every published model in the same words. eps: of the norms.

    The inner width is that of SwiGLU, or of the experts where they are in every block.
    """
    sizes = [b.ffn.gate.out_features for b in decoder.blocks if isinstance(b.ffn, SwiGLU)]
    sizes += [layer.experts.down.shape[2] for layer in experts_of(decoder).values()]
    return {
        "vocab_size": decoder.embedding.num_embeddings,
        "hidden_size": decoder.embedding.embedding_dim,
        "num_hidden_layers": len(decoder.blocks),
        "intermediate_size": sizes[0],
        "hidden_act": "silu",
        "rms_norm_eps": eps,
    }


def dense_blocks(decoder: Any, model: str) -> int:
    """How many of the first blocks have no experts. Raises ValueError if later ones have none."""
    experts = experts_of(decoder)
    layers = len(decoder.blocks)
    first = min(experts, default=layers)
    rest = list(experts) == list(range(first, layers))
    need(rest, model, "the blocks without experts", "be the first ones", sorted(experts))
    return first


def check_experts(layer: Experts, model: str, routing: str, where: str) -> None:
    """Raises ValueError for experts that the published model does not have."""
    router = layer.router
    need(router.routing == routing, model, where, f'have routing="{routing}"', router.routing)
    shared = layer.shared is not None
    need(shared, model, where, "have a shared expert (--model.shared-experts)", "none")


def add_decoder(
    table: Table,
    decoder: Any,
    add_mixer: Callable[[Table, str, str, Any], None],
    add_moe: Callable[[Table, str, str], None],
    *,
    minus: float = 0.0,
) -> None:
    """The embedding, the blocks, the last norm, and the head unless it is tied.

    add_mixer: adds a block's mixer, given the published name of the block, our name of the mixer,
    and the mixer. add_moe: likewise for experts. minus: of the norms, see `Published`.
    """
    table.whole("model.embed_tokens.weight", "embedding.weight")
    for i, block in enumerate(decoder.blocks):
        name, own = f"model.layers.{i}", f"blocks.{i}"
        table.whole(f"{name}.input_layernorm.weight", f"{own}.mixer_norm.weight", minus=minus)
        add_mixer(table, name, f"{own}.mixer", block.mixer)
        after = f"{name}.post_attention_layernorm.weight"
        table.whole(after, f"{own}.ffn_norm.weight", minus=minus)
        if isinstance(block.ffn, Experts):
            add_moe(table, name, f"{own}.ffn")
        else:
            add_swiglu(table, f"{name}.mlp", f"{own}.ffn")
    table.whole("model.norm.weight", "norm.weight", minus=minus)
    if not is_tied(decoder):
        table.whole("lm_head.weight", "head.weight")


def tied_head(decoder: Any) -> dict[str, str]:
    """The head as a copy of the embedding, if it is one; see `Layout.copies`."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(decoder) else {}


def add_swiglu(table: Table, name: str, own: str) -> None:
    """A SwiGLU `own` as gate_proj, up_proj and down_proj of `name`."""
    for part in ("gate", "up", "down"):
        table.whole(f"{name}.{part}_proj.weight", f"{own}.{part}.weight")


def add_experts(table: Table, name: str, own: str, gate: str, up: str, down: str) -> None:
    """The stacked matrices of `own`, an expert after the other: NAME.0.GATE.weight and so on."""
    count, hidden, inner = table.own[f"{own}.down"]
    for i in range(count):
        for part, first in ((gate, 0), (up, inner)):
            run = Run(f"{own}.gate_up", i * 2 * inner + first, inner)
            table.add(f"{name}.{i}.{part}.weight", run, shape=(inner, hidden))
        run = Run(f"{own}.down", i * hidden, hidden)
        table.add(f"{name}.{i}.{down}.weight", run, shape=(hidden, inner))
