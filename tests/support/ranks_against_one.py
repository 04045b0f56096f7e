"""N ranks against one: token ranges, when results agree, and a layer's training step."""

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.comm.peer_memory import why_not


def contiguous(T, R):
    return None


def uneven(T, R):
    """Ranges of all lengths, one of them empty, dealt out in no order."""
    rng = random.Random(R)
    edges = [0, *sorted(rng.choices(range(T + 1), k=2 * R - 2)), T, T]
    pieces = list(pairwise(edges))
    rng.shuffle(pieces)
    return [pieces[r::R] for r in range(R)]


RANGES = {"contiguous": contiguous, "zigzag": zigzag_token_ranges, "uneven": uneven}


def kinds(device):
    """(dtype, impl) of what is compared."""
    if device.type == "cpu":
        return [(torch.float64, "torch")]
    kernels = [(torch.float32, "triton"), (torch.bfloat16, "triton")]
    return [(torch.float64, "torch"), *kernels]


def assert_close(what, actual, exact, one, fold=0.0):
    """actual (many ranks) errs at most twice as much as one rank, plus six roundings and `walk`; in
    fp32 plus 32 roundings, which is what other chunks and the fold make of products of three TF32
    ones, and still a hundredth of what TF32 alone would err; fp64 by nine digits."""
    if not actual.numel():
        return
    unit = {torch.float64: 1e-9, torch.float32: 2**-18, torch.bfloat16: 3 * 2**-7}[one.dtype]
    error, usual = ((x.double() - exact).abs().max() for x in (actual, one))
    limit = 2 * usual + fold + unit * exact.abs().max().clamp(min=1e-3)
    assert error <= limit, (
        f"{what}: error {error:.1e}, limit {limit:.1e}, of one rank {usual:.1e}, "
        f"largest {exact.abs().max():.1e}"
    )


def device_of(group):
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_of_errors(dg, exact, heads):
    """What a head's sum over dg may be off: six standard deviations of a sum of errors like dg's,
    equal within a chunk; in fp32 also 32 roundings of each term, as test_kernels.py has it,
    since ranks cut the chunks, and so their errors, otherwise."""
    error = dg.double() - exact
    fold = 6 * error.square().mean().sqrt() * (64 * error.numel() / heads) ** 0.5
    if dg.dtype == torch.float32:
        fold += 32 * torch.finfo(dg.dtype).eps * exact.abs().sum()
    return fold


def reason(group, rank):
    return why_not(group)


def need(run, exchange):
    """Skips a test of an exchange that the ranks of `run` cannot have."""
    if exchange == "symmetric" and (why := run(reason)[0]):
        pytest.skip(f"no symmetric memory: {why}")


def same_step(group, ranges, make):
    """A layer, convolution and its halo included: the same weights after two steps of AdamW."""
    device, T, cu = device_of(group), 300, (0, 2, 150, 300)
    torch.manual_seed(0)
    layers = [make().double().to(device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, T, 32, dtype=torch.float64).to(device)
    table = RANGES[ranges](T, group.size())
    contexts = [
        build_cp_context(torch.tensor(cu), g, conv1d_kernel_size=4, token_ranges=r)
        for g, r in ((None, None), (group, table))
    ]
    for layer, context in zip(layers, contexts, strict=True):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            layer(context.shard(x), cp_context=context).square().sum().backward()
            for p in layer.parameters():
                if context.group is not None:
                    dist.all_reduce(p.grad, group=group)
            optimizer.step()
    for (name, a), b in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-7, name
