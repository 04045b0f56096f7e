"""The kernel that forms a packing's tables from cu_seqlens, interpreted on CPU, against the host's
arithmetic."""

import random

import pytest
import torch

from fla_cp.partition.device_tables import DeviceTable
from fla_cp.partition.whole import WholeSequences

pytest.importorskip("triton")  # interpreted: conftest.py
from fla_cp.kernels.triton import chunk_tables
from fla_cp.kernels.triton.operands import columns

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def drawn(sequences, most, seed):
    """Offsets of sequences of 0 to `most` tokens, a third of them at random without tokens."""
    draw = random.Random(seed)
    offsets = [0]
    for _ in range(sequences):
        offsets.append(offsets[-1] + (draw.randint(1, most) if draw.random() > 1 / 3 else 0))
    return tuple(offsets) if offsets[-1] else (*offsets[:-1], 1)


OFFSETS = {
    "no token": (0, 0, 0),
    "one token": (0, 1),
    "a chunk": (0, 64),
    "a chunk and a token": (0, 65),
    "empty ones at both ends": (0, 0, 0, 130, 130, 131, 131),
    "more chunks than a program has": (0, 64 * chunk_tables.CHUNKS + 1, 20000, 20001),
    "as many sequences as are looked at together": drawn(chunk_tables.SEQUENCES, 100, 1),
    "several rounds of sequences": drawn(5 * chunk_tables.SEQUENCES + 3, 200, 2),
    "several rounds and programs": drawn(3 * chunk_tables.SEQUENCES + 1, 700, 3),
    "only short ones": tuple(range(300)),
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dtype, chunk", [(torch.int32, 64), (torch.int64, 64), (torch.int64, 16)])
def test_tables_are_those_of_the_host(name, dtype, chunk, monkeypatch):
    packing, given = WholeSequences(OFFSETS[name], chunk), torch.tensor(OFFSETS[name], dtype=dtype)
    # what the kernel leaves out shows
    monkeypatch.setattr(torch, "empty", lambda n, **how: torch.full((n,), -1, **how))
    chunk_tables.form_tables(packing, given)
    assert packing.has_table(columns, CPU)
    wanted = DeviceTable.send(columns(packing), torch.int32, CPU).columns
    found = packing.table(columns, torch.int32, CPU)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.int32 and a.tolist() == b.tolist()
    assert all(address % 16 == 0 for address in packing.addresses(columns, torch.int32, CPU))


@pytest.mark.parametrize("wrong", [
    (0, -5, 300, 200, 400), (7, 7, 7, 7, 7), (0, 10**6, 3, 400, 10**9), (400, 300, 200, 100, 0),
], ids=str)  # fmt: skip
def test_wrong_offsets_name_no_token_that_does_not_exist(wrong):
    """The host checks the copy that it has; nobody checks that the device has the same numbers."""
    offsets = (0, 100, 200, 300, 400)
    packing = WholeSequences(offsets)
    chunk_tables.form_tables(packing, torch.tensor(wrong))
    start, rows, *_ = packing.table(columns, torch.int32, CPU)
    assert (rows >= 0).all() and (rows <= 64).all()
    assert (start >= 0).all() and (start + rows <= offsets[-1]).all()


def test_the_host_forms_what_the_kernel_does_not(monkeypatch):
    """A table that is there, too many sequences, offsets that are not in one piece."""
    packing, offsets = WholeSequences((0, 3, 9)), torch.tensor([0, 3, 9])
    first = packing.table(columns, torch.int32, CPU)
    chunk_tables.form_tables(packing, offsets)
    assert packing.table(columns, torch.int32, CPU) is first
    chunk_tables.form_tables(
        packing := WholeSequences((0, 3, 9)), torch.tensor([0, 1, 3, 1, 9])[::2]
    )
    assert not packing.has_table(columns, CPU)
    monkeypatch.setattr(chunk_tables, "MOST_SEQUENCES", 1)
    chunk_tables.form_tables(packing := WholeSequences((0, 3, 9)), offsets)
    assert not packing.has_table(columns, CPU)
