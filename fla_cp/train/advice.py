"""Notes of the trainer about a configuration when a run starts: about work that is divided
unequally, and about flags that have no effect."""

from fla_cp.train.config import TrainConfig
from fla_cp.train.mixture import parse_mixture
from fla_cp.train.pattern import mixers_of
from fla_cp.train.token_layout import mirrored_attention, whole_packs


def advice(config: TrainConfig) -> list[str]:
    """The notes for the user, one a line."""
    lines = []
    if whole_packs(config):
        lines.append(
            f"note: each of the {config.parallel.cp} cp ranks holds whole packs, so no state "
            "crosses ranks and the exchange takes 0.0 ms; fewer packs in a micro-batch "
            "(--micro-batch-size 1) would be sharded"
        )
    if config.parallel.layout == "contiguous" and mirrored_attention(config):
        lines.append(
            "note: in documents that are longer than a rank's tokens, the last cp rank may have "
            "nearly twice the mean work of softmax attention; --parallel.layout zigzag divides it "
            "about equally"
        )
    lines += [f"note: {flag} has no effect, because {why}" for flag, why in unused_flags(config)]
    return lines


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
