"""What the trainer says of a configuration when a run starts: work that is divided unequally, and
flags that have no effect."""

from fla_cp.train.config import TrainConfig
from fla_cp.train.mixture import parse_mixture
from fla_cp.train.pattern import SOFTMAX, mixers_of


def advice(config: TrainConfig) -> list[str]:
    """Lines for the user, each a note."""
    lines = []
    if whole_packs(config):
        lines.append(
            f"note: each of the {config.parallel.cp} cp ranks holds whole packs, so no state "
            "crosses ranks and the exchange takes 0.0 ms; fewer packs in a micro-batch "
            "(--micro-batch-size 1) would be sharded"
        )
    if unequal_attention(config):
        lines.append(
            "note: in documents that are longer than a rank's tokens, the last cp rank may have "
            "nearly twice the mean work of softmax attention; --parallel.layout zigzag divides it "
            "about equally"
        )
    lines += [f"note: {flag} has no effect, because {why}" for flag, why in unused_flags(config)]
    return lines


def whole_packs(config: TrainConfig) -> bool:
    """Whether the ranks of a cp group cut micro-batches only between packs.

    The ranks then hold whole documents and exchange no states.
    """
    cp, data = config.parallel.cp, config.data
    packs = data.micro_batch_size or data.global_batch_size // config.parallel.dp
    pieces = 2 * cp if config.parallel.layout == "zigzag" else cp
    return cp > 1 and packs % pieces == 0


def unequal_attention(config: TrainConfig) -> bool:
    """Whether --parallel.layout zigzag would divide the work of softmax attention more equally
    among the ranks of a cp group. Each model of transformers has such layers."""
    parallel, model = config.parallel, config.model
    softmax = model.folder is not None or bool(set(SOFTMAX) & set(mixers_of(model)))
    shared = parallel.cp > 1 and not whole_packs(config)
    possible = parallel.layout == "contiguous" and config.data.max_documents is None
    return softmax and shared and possible


def unused_flags(config: TrainConfig) -> list[tuple[str, str]]:
    """Flags with another value than their default that change nothing in this run, and why."""
    model, data, optim = config.model, config.data, config.optim
    found = []
    if model.folder is None:
        mixers = set(mixers_of(model))
        if model.gate_lower_bound is not None and "kda" not in mixers:
            found.append(("--model.gate-lower-bound", "no block has the mixer kda"))
        if model.mla_rope and "mla" not in mixers:
            found.append(("--model.mla-rope", "no block has the mixer mla"))
        if not ("attention" in mixers or (model.mla_rope and "mla" in mixers)):
            why = "no block has rotary positions"
            given = {"rope-theta": model.rope_theta, "rope-scaling": model.rope_scaling}
            found += [(f"--model.{name}", why) for name, x in given.items() if x is not None]
    sources = [source for source, _ in parse_mixture(data.source)]
    if data.column is not None and not any(source.startswith("hf:") for source in sources):
        found.append(("--data.column", "--data has no hf:PATH"))
    if optim.decay_ratio != type(optim).decay_ratio and optim.schedule != "wsd":
        found.append(("--optim.decay-ratio", "--schedule is not wsd"))
    if optim.momentum != type(optim).momentum and optim.name != "muon":
        found.append(("--optim.momentum", "--optimizer is not muon"))
    return found
