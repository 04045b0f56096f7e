"""Which rank owns which tokens: packings, slots, ranges, shard and unshard."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, contiguous_token_ranges, ops, zigzag_token_ranges
from fla_cp.handle import Handle
from fla_cp.partition.packing import Packing
from fla_cp.partition.slots import link_slots
from tests.support.ranks import run_threads


def test_segments_cut_at_sequences_ranges_and_length():
    packing = Packing.build((0, 100, 100, 300), [(200, 300), (80, 200)], segment_chunks=1)
    rows = [(s.start, s.stop, s.sequence, s.entry, s.exit) for s in packing.segments]
    assert rows == [
        (0, 64, 2, 0, -1),
        (64, 100, 2, -1, -1),
        (100, 120, 0, 1, -1),
        (120, 184, 2, -1, -1),
        (184, 220, 2, -1, 1),
    ]
    assert packing.chains == ((0, 1), (2,), (3, 4))
    assert packing.empty == (1,)
    assert (packing.tokens, packing.ranges, packing.sequences) == (220, 2, 3)


def test_links_follow_sequence_order_not_ownership():
    links = link_slots((0, 100, 400), (((300, 400), (0, 50)), ((50, 120), (120, 300))))
    assert links.owner == (0, 1, 1, 0)
    assert links.row == (1, 0, 1, 0)
    assert links.continues == (False, True, True, True)
    assert links.through == (False, False, True, False)
    mirror = links.mirrored()
    assert mirror.continues == (False, True, True, True)
    assert mirror.through == (False, True, False, False)
    assert mirror.mirrored() == links


def test_a_slot_that_two_sequences_share_is_not_passed_through():
    links = link_slots((0, 90, 200), (((0, 50),), ((50, 120),), ((120, 200),)))
    assert links.continues == (False, True, True)
    assert links.through == (False, False, False)


@pytest.mark.parametrize("total", [0, 1, 3, 64, 1000])
@pytest.mark.parametrize("R", [1, 2, 3, 8])
def test_ranges_tile_the_batch(total, R):
    for ranges in (contiguous_token_ranges(total, R), zigzag_token_ranges(total, R)):
        assert len(ranges) == R
        flat = sorted(r for own in ranges for r in own)
        assert flat[0][0] == 0
        assert flat[-1][1] == total
        assert all(a[1] == b[0] for a, b in pairwise(flat))
    lengths = [hi - lo for ((lo, hi),) in contiguous_token_ranges(total, R)]
    assert max(lengths) - min(lengths) <= 1
    pairs = zigzag_token_ranges(total, R)
    lengths = [hi - lo for pair in pairs for lo, hi in pair]
    assert max(lengths) - min(lengths) <= 1
    early, late = zip(*pairs, strict=True)
    assert list(early + late[::-1]) == sorted(early + late)  # piece r and piece 2R-1-r


RANGES = {
    "contiguous": None,
    "zigzag": zigzag_token_ranges(40, 3),
    "rank-without-ranges": [[(3, 40)], [], [(0, 3)]],
    "uneven": [[(10, 40)], [(0, 0)], [(7, 10), (0, 7)]],
}


def roundtrip(group, rank, ranges):
    x = torch.arange(80.0, dtype=torch.float64).view(1, 40, 2).requires_grad_()
    context = build_cp_context(torch.tensor([0, 13, 40]), group, token_ranges=ranges)
    local = context.shard(x)
    assert local.shape == (1, context.local_tokens, 2)
    assert torch.equal(context.unshard(local), x)
    assert torch.equal(context.unshard(local[0].T, -1), x[0].T)
    weight = torch.arange(80.0, dtype=torch.float64).view(1, 40, 2) ** 2
    leaf = local.detach().requires_grad_()
    (context.unshard(leaf) * weight).sum().backward()
    assert torch.equal(leaf.grad, context.shard(weight))
    local.sum().backward()
    assert x.grad.sum() == local.numel()
    assert context.cu_seqlens_cpu.tolist()[-1] == context.local_tokens
    return context.local_tokens


@pytest.mark.parametrize("name", RANGES)
def test_shard_and_unshard_are_inverse(name):
    assert sum(run_threads(roundtrip, 3, RANGES[name])) == 40


def unsharded(group, rank):
    """Tensors of dtypes that gloo does not know."""
    context = build_cp_context(torch.tensor([0, 7]), group)
    for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16):
        x = torch.arange(7).to(dtype)
        for whole in (x, x[:, None], x.repeat(2, 1).T, x.new_empty(7, 0)):
            found = context.unshard(context.shard(whole, 0), 0)
            assert found.dtype == dtype
            assert found.tolist() == whole.tolist()


def test_every_dtype_is_unsharded(gloo_pool):
    gloo_pool.run(unsharded, world_size=2)


def test_rows_without_tokens_are_unsharded():
    context = build_cp_context(torch.tensor([0, 0]), None)
    x = torch.ones(2, 0, 3, requires_grad=True)
    context.unshard(x).sum().backward()
    assert x.grad.shape == x.shape


def test_what_unshard_returns_may_be_changed_in_place():
    context, x = build_cp_context(torch.tensor([0, 3, 5]), None), torch.ones(1, 5, 2)
    y = context.unshard(x.requires_grad_())
    y *= 2
    y.sum().backward()
    assert (x.grad == 2).all()


def test_rows_are_folded():
    context = build_cp_context(torch.tensor([0, 5, 10, 15]), None)
    x = torch.randn(3, 5, 2)
    assert torch.equal(context.shard(x), x.view(1, 15, 2))
    assert torch.equal(context.shard(x[..., 0]), x[..., 0].reshape(1, 15))
    with pytest.raises(ValueError, match=r"total_tokens=15 tokens in dim 1, got shape \(3, 4, 2\)"):
        context.shard(x[:, :4])


@pytest.mark.parametrize("divide", [contiguous_token_ranges, zigzag_token_ranges])
def test_divisions_take_integers_only(divide):
    for total in (-3, 10.0, "10", None, True, torch.tensor(1.0), torch.tensor(True)):
        with pytest.raises(ValueError, match=r"^total must be an integer from 0, got "):
            divide(total, 2)
    for ranks in (0, -1, 2.0, "2", None, True):
        with pytest.raises(ValueError, match=r"^world_size must be an integer from 1, got "):
            divide(10, ranks)
    expected = divide(10, 2)
    for total, ranks in ((np.int64(10), np.int32(2)), (torch.tensor(10), torch.tensor(2))):
        assert divide(total, ranks) == expected
        assert {type(n) for own in divide(total, ranks) for pair in own for n in pair} == {int}
    assert {pair for own in divide(0, 2) for pair in own} == {(0, 0)}


def test_shard_and_unshard_take_tensors_and_their_dims_only():
    context = build_cp_context(torch.tensor([0, 10]), None)
    for move, name in ((context.shard, "total_tokens"), (context.unshard, "local_tokens")):
        for bad in ([1] * 10, None, "x", np.zeros((1, 10))):
            with pytest.raises(ValueError, match=f"^x must be a tensor, got {type(bad).__name__}$"):
                move(bad)
        for shape, dim in (((1, 10), 5), ((1, 10), -3), ((1, 10), "1"), ((10,), 1), ((), 0)):
            with pytest.raises(ValueError, match=f"^x must have {name}=10 tokens in dim {dim}, "):
                move(torch.ones(shape), dim)
        assert move(torch.ones(10, 2), -2).shape == (10, 2)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_a_context_is_repeated_a_number_of_times(n):
    with pytest.raises(ValueError, match=r"^n must be an integer from 1, got "):
        build_cp_context(torch.tensor([0, 10]), None).repeated(n)


def differing(group, rank):
    cu = torch.tensor([0, 10 + (rank == 1), 20])
    with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0"):
        build_cp_context(cu, group, check=True)
    ranges = [[(0, 5 + (rank == 2))], [(5 + (rank == 2), 9)], [(9, 20)]]
    for options, odd in (
        ({"token_ranges": ranges}, 2),
        ({"conv1d_kernel_size": 4 - (rank == 1)}, 1),
        ({"exchange": "ring" if rank == 2 else "scan"}, 2),
    ):
        with pytest.raises(ValueError, match=rf"ranks \[{odd}\] differ from rank 0"):
            build_cp_context(torch.tensor([0, 20]), group, check=True, **options)
    build_cp_context(torch.tensor([0, 10, 20]), group, check=True)


def test_check_finds_a_rank_with_another_table():
    run_threads(differing, 3)


def test_offsets_live_on_the_device_given_and_are_read_on_the_host():
    host = torch.tensor([0, 5, 15])
    unreadable = host.to("meta")  # like a device's tensor: reading it would wait for the device
    ranges = [[(3, 15), (0, 3)]]
    context = build_cp_context(unreadable, None, cu_seqlens_cpu=host, token_ranges=ranges)
    assert context.cu_seqlens.device.type == "meta"
    assert context.cu_seqlens_cpu.tolist() == [0, 2, 12, 15]
    assert context.cu_seqlens.dtype == context.cu_seqlens_cpu.dtype == torch.int32


def test_context_is_frozen_and_compared_by_identity():
    context, other = (build_cp_context(torch.tensor([0, 2, 5]), None) for _ in range(2))
    with pytest.raises(AttributeError):
        context.rank = 1
    assert context == context
    assert context != other
    assert len({context, other}) == 2


def test_fsdp_passes_a_context_on_as_it_is():
    """A copy at every call would cost host time and lose the tables that the context caches."""
    from torch.distributed.utils import _apply_to_tensors

    context = build_cp_context(torch.tensor([0, 5, 9]), None)
    kept = _apply_to_tensors(lambda t: t.double(), {"cp_context": context})
    assert kept["cp_context"] is context


@pytest.mark.parametrize(
    "pair",
    [
        (np.int64(0), np.int32(10)),
        (torch.tensor(0), torch.tensor(10)),
        [0, 10],
        np.array([0, 10]),
        torch.tensor([0, 10]),
    ],
    ids=["numpy ints", "torch ints", "list", "array", "tensor"],
)
def test_token_ranges_of_integers(pair):
    context = build_cp_context(torch.tensor([0, 10]), None, token_ranges=[[pair]])
    assert context.token_ranges == (((0, 10),),)
    assert all(type(n) is int for n in context.token_ranges[0][0])


PAIR = r"token_ranges must hold \[start, stop\) of two integers, got "
LISTS = r"token_ranges must have one list of \[start, stop\) per rank, got "


@pytest.mark.parametrize(
    "ranges, message",
    [
        ([[(0, 9.6)]], PAIR + r"\(0, 9.6\)"),  # int() made it 9
        ([[(0.0, 10.0)]], PAIR + r"\(0.0, 10.0\)"),
        ([[(0, torch.tensor(10.5))]], PAIR),
        ([[(0, torch.tensor([10, 11]))]], PAIR),
        ([[(0, np.float64(10))]], PAIR),
        ([[(False, 10)]], PAIR + r"\(False, 10\)"),
        ([[(0, None)]], PAIR + r"\(0, None\)"),
        ([[("0", "10")]], PAIR),
        ([["01"]], PAIR + "'01'"),
        ([[(0, 5, 10)]], PAIR + r"\(0, 5, 10\)"),
        ([[(0,)]], PAIR + r"\(0,\)"),
        ([[0, 10]], LISTS + r"\[0, 10\] in place of a rank's list"),
        ([[None]], PAIR + "None"),
        ([None], LISTS + "None"),
        ([(0, 10)], LISTS + r"\(0, 10\) in place of a rank's list"),
        (10, LISTS + "10"),
        ("0:10", LISTS + "'0:10'"),
        ({0: (0, 10)}, LISTS + r"\{0: \(0, 10\)\}"),
        ([{(0, 10)}], LISTS),
        ([], "one list per rank, got 0 for 1 rank$"),
    ],
)
def test_token_ranges_of_anything_else(ranges, message):
    with pytest.raises(ValueError, match=message):
        build_cp_context(torch.tensor([0, 10]), None, token_ranges=ranges)


@pytest.mark.parametrize("value", [4.0, "4", True, torch.tensor(4.0), [4]])
@pytest.mark.parametrize("name", ["max_sequences", "conv1d_kernel_size"])
def test_numbers_that_are_not_integers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer, or None, got "):
        build_cp_context(torch.tensor([0, 10]), None, **{name: value})


def test_numpy_integers_are_numbers():
    options = {"max_sequences": np.int64(3), "conv1d_kernel_size": np.int32(4)}
    context = build_cp_context(torch.tensor([0, 10]), None, **options)
    assert (context.max_sequences, context.conv1d_kernel_size) == (3, 4)
    assert type(context.max_sequences) is type(context.conv1d_kernel_size) is int


class Mesh:
    def get_group(self):
        return None


@pytest.mark.parametrize("group", ["cp", 2, [0, 1], torch.tensor(1), Mesh()])
def test_groups_of_wrong_type(group):
    hint = r"Mesh: pass mesh.get_group\(\)" if isinstance(group, Mesh) else type(group).__name__
    message = f"group must be a torch.distributed.ProcessGroup, or None for one rank, got {hint}$"
    with pytest.raises(ValueError, match=message):
        build_cp_context(torch.tensor([0, 10]), group)


@pytest.mark.parametrize("check", ["no", 1, 0, torch.tensor(True)])
def test_check_is_a_flag(check):
    with pytest.raises(ValueError, match="check must be True or False, got"):
        build_cp_context(torch.tensor([0, 10]), None, check=check)


@pytest.mark.parametrize("exchange", [None, 3, ["ring"]])
def test_exchanges_of_wrong_type(exchange):
    with pytest.raises(ValueError, match=f"'auto', got {type(exchange).__name__}"):
        build_cp_context(torch.tensor([0, 10]), None, exchange=exchange)


@pytest.mark.parametrize("name", ["causal_conv1d", "chunk_kda", "cp_chunk_gla"])
@pytest.mark.parametrize("context", ["context", 0, torch.tensor([0, 10]), (None, 0, 1)])
def test_contexts_of_wrong_type(name, context):
    q, v, g = torch.ones(1, 10, 1, 4), torch.ones(1, 10, 1, 4), -torch.ones(1, 10, 1, 4)
    inputs = {
        "causal_conv1d": [torch.ones(1, 10, 3), torch.ones(3, 4)],
        "chunk_kda": [q, q, v, g, torch.ones(1, 10, 1)],
        "cp_chunk_gla": [q, q, v, g],
    }[name]
    message = (
        rf"cp_context must be a FLACPContext \(build_cp_context\), got {type(context).__name__}"
    )
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(*inputs, cp_context=context)


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        (None, "cu_seqlens must be a tensor, got NoneType"),
        ([0, 10], "cu_seqlens must be a tensor, got list"),
        (torch.tensor([0, 10]).to_sparse(), "cu_seqlens must be dense, got torch.sparse_coo"),
        (torch.tensor([[0, 10]]), "cu_seqlens must be 1-d"),
        (torch.tensor([False, True]), "cu_seqlens must be int32 or int64, got torch.bool"),
    ],
)
def test_offsets_of_wrong_type(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        build_cp_context(cu_seqlens, None)


def no_rank(group, rank):
    pair = dist.new_group([0, 1])
    if rank == 2:
        for outside in (pair, dist.GroupMember.NON_GROUP_MEMBER):
            with pytest.raises(ValueError, match="group must contain this process"):
                build_cp_context(torch.tensor([0, 10]), outside)


def test_a_process_outside_the_group():
    run_threads(no_rank, 3)


def test_any_number_of_tokens_has_a_handle():
    """The product of the sizes is above 2^63, which torch refuses in an ordinary empty tensor."""
    tokens, documents = 1 << 24, 1000
    offsets = torch.arange(documents + 1, dtype=torch.int64) * tokens // documents
    sizes = build_cp_context(offsets, None, conv1d_kernel_size=4).handle.sizes
    found = Handle.read(sizes)
    assert found.sequences == documents
    assert tokens // 16 <= found.chunks(16) <= tokens // 16 + documents

    @torch.compile(fullgraph=True, backend="aot_eager")
    def chunks(sizes):
        return torch.zeros(Handle.read(sizes).chunks(64))

    assert len(chunks(sizes)) == found.chunks(64)
    assert len(chunks(build_cp_context(torch.tensor([0, 100]), None).handle.sizes)) == 2
