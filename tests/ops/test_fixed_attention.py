"""Softmax attention under contexts of fixed shape: a CUDA graph of it would hold the same for every
packing. PyTorch's kernel, which is CUDA's alone, has stand-ins."""

import pytest
import torch

from fla_cp import causal_attention
from fla_cp.kernels.torch import attention
from fla_cp.partition.fixed_lengths import FixedLengths
from fla_cp.partition.key_rows import Lengths
from tests.support.fixed import CALLS, PACKINGS, equal_ordinary, fixed, tables
from tests.support.ranks import run_threads


def flash_attention(q, k, v, queries, keys, longest, longest_keys, *_, scale):
    """Stands for PyTorch's kernel, which is CUDA's alone: it reads the offsets on the device."""
    found = attention._torch(q, k, v, lengths_of(queries, keys), scale)
    assert longest >= queries.diff().max() and longest_keys >= keys.diff().max()
    return found.o, found.lse


def flash_attention_bwd(do, q, k, v, o, lse, queries, keys, longest, longest_keys, *_, scale):
    """The same; gradients of keys that no query reads are garbage."""
    found = attention.Attended(o, lse)
    dq, *grads = attention._torch_bwd(do, q, k, v, found, lengths_of(queries, keys), scale)
    unread = int(keys[1]) if not queries[1] else 0
    return dq, *(torch.cat([torch.full_like(d[:unread], torch.nan), d[unread:]]) for d in grads)


def lengths_of(queries, keys):
    return Lengths(*(tuple(x.diff().tolist()) for x in (queries, keys)))


@pytest.fixture
def flash(monkeypatch):
    """On the CPU, attention goes the way that it goes on a GPU."""
    monkeypatch.setattr(attention, "flash_runs", lambda q, v: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_attention_bwd)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["attention", "mla"])
def test_flash_attention_reads_the_tables_of_the_present_packing(flash, name, ranks):
    run_threads(equal_ordinary, ranks, name, "torch", PACKINGS)


def operations(group, rank, name):
    """What a CUDA graph would contain: torch's operations with shapes, and with numbers that say
    which tensors are tables of the context."""
    from torch.utils._python_dispatch import TorchDispatchMode

    call, context, held = CALLS[name](torch.float32, "torch"), fixed(PACKINGS[0], group), []

    class Operations(TorchDispatchMode):
        def __init__(self, places):
            super().__init__()
            self.places, self.seen = places, []

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            given = [(x.shape, self.places.get(x.data_ptr())) for x in tensors]
            numbers = [x for x in args if isinstance(x, int | float | bool)]
            self.seen.append((str(f), given, numbers))
            return f(*args, **kwargs or {})

    call(context)
    for offsets in PACKINGS:
        context.update(torch.tensor(offsets))
        places = {address: key for key, (address, _) in tables(context).items()}
        with Operations(places) as found:
            call(context)
        held.append(found.seen)
    read = {place for _, given, _ in held[0] for _, place in given if place is not None}
    assert len(read) >= (3 if name == "mla" else 2), read  # at least offsets, and positions
    for offsets, other in zip(PACKINGS[1:], held[1:], strict=True):
        for a, b in zip(held[0], other, strict=True):
            assert a == b, (offsets, a, b)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["attention", "mla"])
def test_attention_runs_the_same_operations_whatever_the_packing(flash, monkeypatch, name, ranks):
    def forward(q, k, v, *offsets, **_):
        assert q.shape[1] and all(isinstance(x, int | float | bool) for x in offsets[2:])
        return torch.zeros_like(q), q.new_zeros(q.shape[1], len(q)) + offsets[0][0] + offsets[1][0]

    def backward(do, q, k, v, *_, **__):
        return tuple(map(torch.zeros_like, (q, k, v)))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    run_threads(operations, ranks, name)


def asking(group, rank, exchange):
    context = fixed((0, 8), group, 3)
    q, k, v = (context.shard(torch.zeros(1, 8, 2, 4)) for _ in range(3))
    causal_attention(q, k, v, cp_context=context, exchange=exchange)


@pytest.mark.parametrize("exchange", ["ring", "by_heads"])
def test_other_exchanges_are_refused_by_name(exchange):
    message = f"exchange must be 'auto' or 'gathered' .* max_sequences, got '{exchange}'"
    with pytest.raises(ValueError, match=message):
        run_threads(asking, 2, exchange)


def test_lengths_of_every_rank():
    """The example of fixed_lengths.py, and then another packing in the same tensors."""
    lengths = FixedLengths((0, 3, 7, 12), (5, 12), 4)
    device = torch.device("cpu")
    before = [*lengths.offsets(device), lengths.positions(device), lengths.unread(device)]
    assert (lengths.queries, lengths.keys) == ((0, 2, 5, 0, 0), (3, 4, 5, 0, 0))
    assert before[2].tolist() == [2, 3, 0, 1, 2, 3, 4]
    lengths.fill((0, 12))
    after = [*lengths.offsets(device), lengths.positions(device), lengths.unread(device)]
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in after]
    assert [x.tolist() for x in after[:3]] == [
        [0, 0, 7, 7, 7, 7],
        [0, 0, 12, 12, 12, 12],
        [5, 6, 7, 8, 9, 10, 11],
    ]
    assert not after[3].any() and lengths.longest == (7, 12)


def test_torch_operations_are_not_captured_for_several_packings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths = FixedLengths((0, 4), (0, 4), 2)
    with pytest.raises(RuntimeError, match="only flash attention can be captured"):
        list(attention._blocks(lengths, torch.device("cuda")))
    assert list(attention._blocks(Lengths((4,), (4,)), torch.device("cuda")))
