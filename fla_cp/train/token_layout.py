"""Which token ranges the cp ranks of a run have."""

from fla_cp.train.config import TrainConfig
from fla_cp.train.pattern import SOFTMAX, mixers_of


def whole_packs(config: TrainConfig) -> bool:
    """Whether the ranks of a cp group cut micro-batches only between packs.

    The ranks then hold whole documents and exchange no states.
    """
    cp, data = config.parallel.cp, config.data
    packs = data.micro_batch_size or data.global_batch_size // config.parallel.dp
    pieces = 2 * cp if config.parallel.layout == "zigzag" else cp
    return cp > 1 and packs % pieces == 0


def mirrored_attention(config: TrainConfig) -> bool:
    """Whether zig-zag ranges divide the work of softmax attention more equally among the ranks of a
    cp group. Each model of transformers has such layers."""
    parallel, model = config.parallel, config.model
    softmax = model.folder is not None or bool(set(SOFTMAX) & set(mixers_of(model)))
    possible = parallel.cp > 1 and config.data.max_documents is None
    return softmax and possible and not whole_packs(config)


def layout_of(config: TrainConfig) -> str:
    """The name of the token ranges: `--parallel.layout`, or what "auto" chooses."""
    if config.parallel.layout != "auto":
        return config.parallel.layout
    return "zigzag" if mirrored_attention(config) else "contiguous"
