"""The kernel that clears what lies behind the documents of a packing, interpreted on CPU."""

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py
from fla_cp.kernels.triton.clear import clear


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", [
    ((5, 1, 16, 16), (5, 1, 64, 16)),  # the second one is larger
    ((5, 3, 96, 80), (5, 3, 64, 80)),  # several programs, the last of which is not full
    ((5, 1, 64, 64), (5, 1, 64, 64)),  # a program for each row
], ids=str)  # fmt: skip
@pytest.mark.parametrize("first", [0, 3, 5])
def test_rows_from_the_first_one_on_are_zeros(dtype, shapes, first):
    """What lies before stays, and so does what lies behind in memory."""
    whole = [torch.full((6, *shape[1:]), torch.nan, dtype=dtype) for shape in shapes]
    clear(*(x[:5] for x in whole), first)
    for x in whole:
        assert x[:first].isnan().all() and x[5:].isnan().all()
        assert (x[first:5] == 0).all()
