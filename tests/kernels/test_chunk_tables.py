"""The kernel that forms a packing's tables from cu_seqlens, interpreted on CPU, against the host's
arithmetic."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from fla_cp.partition.device_tables import DeviceTable
from fla_cp.partition.whole import WholeSequences

pytest.importorskip("triton")  # interpreted: conftest.py
from fla_cp.kernels.triton import chunk_tables
from fla_cp.kernels.triton.operands import columns

CPU = torch.device("cpu")


def packed(offsets, given, chunk=64):
    """The packing of these offsets, which forms its tables from `given`."""
    frame = WholeSequences.of(offsets, chunk).frame
    former = chunk_tables.table_former(frame, given.dtype, CPU)
    return WholeSequences(offsets, frame, former, (given, None))


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
    packing = packed(OFFSETS[name], torch.tensor(OFFSETS[name], dtype=dtype), chunk)
    # what the kernel leaves out shows
    monkeypatch.setattr(torch, "empty", lambda n, **how: torch.full((n,), -1, **how))
    wanted = DeviceTable.send(columns(packing), torch.int32, CPU).columns
    with monkeypatch.context() as patch:
        patch.setattr(DeviceTable, "send", None)
        found = packing.table(columns, torch.int32, CPU)
    assert packing.source is None
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.int32 and a.tolist() == b.tolist()
    assert all(address % 16 == 0 for address in packing.addresses(columns, torch.int32, CPU))


@pytest.mark.parametrize("wrong", [
    (0, -5, 300, 200, 400), (7, 7, 7, 7, 7), (0, 10**6, 3, 400, 10**9), (400, 300, 200, 100, 0),
], ids=str)  # fmt: skip
def test_wrong_offsets_name_no_token_that_does_not_exist(wrong):
    """The host checks the copy that it has; nobody checks that the device has the same numbers."""
    offsets = (0, 100, 200, 300, 400)
    packing = packed(offsets, torch.tensor(wrong))
    start, rows, *_ = packing.table(columns, torch.int32, CPU)
    assert (rows >= 0).all() and (rows <= 64).all()
    assert (start >= 0).all() and (start + rows <= offsets[-1]).all()


def test_the_host_forms_what_the_kernel_does_not(monkeypatch):
    """Too many sequences, and another table."""
    offsets = 0, 3, 9
    wrong = torch.tensor([0, 4, 9])
    found = packed(offsets, wrong).table(columns, torch.int32, CPU)
    assert found[2].tolist()[:2] == [0, 4]  # the kernel's
    counted = packed(offsets, wrong)
    assert counted.table(lambda packing: ([7],), torch.int32, CPU)[0].tolist() == [7]
    monkeypatch.setattr(chunk_tables, "MOST_SEQUENCES", 1)
    found = packed(offsets, wrong).table(columns, torch.int32, CPU)
    assert found[2].tolist()[:2] == [0, 3]


def test_tables_that_are_allocated_together_are_apart(monkeypatch):
    """Also those of two streams, and in two threads at a time."""
    former = chunk_tables.TableFormer(WholeSequences.of((0, 3, 9)).frame, CPU)
    monkeypatch.setattr(former, "_launch", lambda *given: None)
    given = WholeSequences((0, 3, 9), None), torch.tensor([0, 3, 9])
    streams = [*[1] * (chunk_tables.TABLES + 1), 2, 1, None, None]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda stream: (former(columns, *given, stream), stream), streams))
    spans = sorted((table.addresses[0], 4 * former.size) for table, _ in found)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    memory = {}
    for table, stream in found:
        assert memory.setdefault(id(table.memory), stream) == stream
    for table, _ in found:
        assert [x.data_ptr() for x in table.columns] == list(table.addresses)
