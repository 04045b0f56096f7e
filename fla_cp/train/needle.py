"""Documents that hide a needle: a marked value somewhere among fillers, which the end asks for.

    filler .. filler MARK value filler .. filler ASK value

Only the last value counts as a target. A model that gives it has carried the value over all tokens
between, so its share of right answers, by depth and length, says how far its memory reaches.
"""

from __future__ import annotations

import numpy as np

from fla_cp.train.data import ArraySource

VOCAB_SIZE = 64
MARK, ASK, FIRST_FILLER, FIRST_VALUE = 0, 1, 2, 48
SHORTEST = 16
TOKENS = {"train": 1 << 21, "valid": 1 << 17}


class NeedleSource(ArraySource):
    """Documents of up to `longest` tokens with log-uniform lengths and uniform depths.

    Raises ValueError for a longest below SHORTEST or a negative seed.
    """

    def __init__(self, longest: int, seed: int, split: str) -> None:
        if longest < SHORTEST:
            raise ValueError(f"needle:LENGTH must have a LENGTH from {SHORTEST}, got {longest}")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        rng = np.random.default_rng([seed, longest, sorted(TOKENS).index(split)])
        documents: list[np.ndarray] = []
        ends = [0]
        while ends[-1] < max(TOKENS[split], 8 * longest):
            length = round(np.exp(rng.uniform(np.log(SHORTEST), np.log(longest))))
            documents.append(needle_document(rng, length, rng.random()))
            ends.append(ends[-1] + length)
        offsets = np.array(ends, dtype=np.int64)
        super().__init__(np.concatenate(documents), offsets, VOCAB_SIZE)

    def counted(self, start: int, stop: int) -> np.ndarray:
        ends = self.offsets[1:] - 1
        return np.isin(np.arange(start, stop, dtype=np.int64), ends)


def needle_document(rng: np.random.Generator, length: int, depth: float) -> np.ndarray:
    """uint8 [length], of which the last is the answer. depth: 0 puts the needle first, 1 last."""
    tokens = rng.integers(FIRST_FILLER, FIRST_VALUE, size=length, dtype=np.uint8)
    value = rng.integers(FIRST_VALUE, VOCAB_SIZE)
    at = round(depth * (length - 4))
    tokens[at : at + 2] = MARK, value
    tokens[-2:] = ASK, value
    return tokens
