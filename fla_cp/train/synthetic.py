"""Generated documents whose next token can be learnt by copying and by recall.

There are two kinds, in random order and with log-uniform lengths. A *copy* document repeats a
phrase in which no symbol occurs twice: after the first period, each token follows from the one
before. A *recall* document lists key-value pairs in random order: a key cannot be predicted, but
its value can be once the pair has occurred. Both kinds need a state that survives many chunks, and
nothing from outside the document.
"""

import numpy as np

VOCAB_SIZE = 64
COPY, RECALL = 0, 1  # first token of a document
FIRST_SYMBOL = 2
TOKENS = {"train": 1 << 22, "valid": 1 << 19}
SHORTEST, LONGEST = 16, 8192


def synthetic_source(seed: int, split: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens uint8 [N], document offsets int64 [D+1], vocabulary size; a function of the arguments.

    Raises ValueError if seed < 0.
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    rng = np.random.default_rng([seed, sorted(TOKENS).index(split)])
    documents: list[np.ndarray] = []
    offsets = [0]
    while offsets[-1] < TOKENS[split]:
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        length = min(length, TOKENS[split] - offsets[-1])
        make = _copy if rng.random() < 0.5 else _recall
        documents.append(make(rng, length))
        offsets.append(offsets[-1] + length)
    return np.concatenate(documents), np.array(offsets, dtype=np.int64), VOCAB_SIZE


def _copy(rng: np.random.Generator, length: int) -> np.ndarray:
    period = int(rng.integers(4, VOCAB_SIZE - FIRST_SYMBOL))
    symbols = rng.permutation(np.arange(FIRST_SYMBOL, VOCAB_SIZE, dtype=np.uint8))[:period]
    return np.concatenate([[COPY], np.resize(symbols, length - 1)]).astype(np.uint8)


def _recall(rng: np.random.Generator, length: int) -> np.ndarray:
    middle = (FIRST_SYMBOL + VOCAB_SIZE) // 2
    keys = np.arange(FIRST_SYMBOL, middle)
    values = rng.integers(middle, VOCAB_SIZE, size=len(keys))
    drawn = rng.integers(len(keys), size=length // 2)
    pairs = np.stack([keys[drawn], values[drawn]], axis=1).reshape(-1)
    return np.concatenate([[RECALL], pairs])[:length].astype(np.uint8)
