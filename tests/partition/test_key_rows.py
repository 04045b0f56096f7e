"""Which keys a rank gets, against a search through all tokens."""

import pytest
import torch

from fla_cp.partition.key_rows import KeyRows, indices, pieces
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges

CPU = torch.device("cpu")
OFFSETS = [(0, 23), (0, 5, 5, 11, 23), (0, 6, 12, 17, 23)]
LAYOUTS = {
    "contiguous": contiguous_token_ranges(23, 4),
    "zigzag": zigzag_token_ranges(23, 4),
    "crossed": [[(20, 23), (0, 4)], [(9, 20)], [], [(4, 9)]],
}


def begin_of(offsets, token):
    return max(x for x in offsets[:-1] if x <= token)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_piece_gets_its_keys_in_order(layout, offsets):
    ranges = tuple(tuple(map(tuple, r)) for r in LAYOUTS[layout])
    tokens = [[t for lo, hi in r for t in range(lo, hi)] for r in ranges]
    rows = [KeyRows.build(offsets, ranges, rank) for rank in range(4)]
    for rank, own in enumerate(rows):
        arrived = []
        for sender, theirs in enumerate(rows):
            leaving = indices(theirs.send[rank], CPU).tolist()
            assert len(leaving) == len(set(leaving)) == own.receive[sender]
            arrived += [tokens[sender][i] for i in leaving]
        wanted = [list(range(p.begin, p.hi)) for p in pieces(offsets, ranges[rank])]
        assert set(arrived) == {t for piece in wanted for t in piece}  # and nothing else is sent
        taken = own.taken(CPU)
        keys = arrived if taken is None else [arrived[i] for i in taken.tolist()]
        assert keys == [t for piece in wanted for t in piece]
        assert own.lengths.keys == tuple(map(len, wanted))
        assert sum(own.lengths.queries) == own.tokens == len(tokens[rank])
        for round_ in own.rounds:
            rows_of_round = [keys[i] for lo, hi in round_ for i in range(lo, hi)]
            assert len(rows_of_round) == len(set(rows_of_round))
        assert own.crosses == any(
            begin_of(offsets, t) < t and u not in tokens[r]
            for r in range(4)
            for t in tokens[r]
            for u in range(begin_of(offsets, t), t)
        )


def test_contiguous_ranges_need_no_copy():
    ranges = tuple(map(tuple, contiguous_token_ranges(64, 4)))
    assert all(KeyRows.build((0, 10, 64), ranges, rank).take is None for rank in range(4))


def test_documents_of_one_rank_are_not_exchanged():
    ranges = tuple(map(tuple, contiguous_token_ranges(64, 4)))
    assert not KeyRows.build((0, 16, 32, 48, 64), ranges, 1).crosses
