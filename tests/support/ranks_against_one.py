"""Compares N ranks with one: token ranges, tolerances, and a layer's training step."""

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
    """Ranges of all lengths, one of them empty, in random order."""
    rng = random.Random(R)
    edges = [0, *sorted(rng.choices(range(T + 1), k=2 * R - 2)), T, T]
    pieces = list(pairwise(edges))
    rng.shuffle(pieces)
    return [pieces[r::R] for r in range(R)]


RANGES = {"contiguous": contiguous, "zigzag": zigzag_token_ranges, "uneven": uneven}


def kinds(device):
    """The (dtype, impl) pairs that are compared on this device."""
    if device.type == "cpu":
        return [(torch.float64, "torch")]
    kernels = [(torch.float32, "triton"), (torch.bfloat16, "triton")]
    return [(torch.float64, "torch"), *kernels]


def assert_close(what, actual, exact, one, fold=0.0):
    """Asserts that N ranks err at most twice as much as one rank in the root mean square, and four
    times as much in the largest element, plus roundings.

    Both sides round differently, because they cut chunks at other tokens. Of 16 inputs, their root
    mean squares were within 22% of each other, but one largest element was 2.1 times the other.

    actual: of N ranks. one: of one rank. In fp64 nine digits must agree; in bf16 six roundings are
    added. In fp32 it is 32 roundings: chunks and the fold differ, and their products of three TF32
    terms round in another way. This is still a hundredth of the error of plain TF32. fold: an
    additional error.
    """
    if not actual.numel():
        return
    unit = {torch.float64: 1e-9, torch.float32: 2**-18, torch.bfloat16: 3 * 2**-7}[one.dtype]
    errors = [x.double() - exact for x in (actual, one)]
    for name, times, size in (("mean", 2, root_mean_square), ("largest", 4, largest)):
        error, usual = map(size, errors)
        limit = times * usual + fold + unit * size(exact).clamp(min=1e-3)
        assert error <= limit, (
            f"{what}: {name} error {error:.1e}, limit {limit:.1e}, of one rank {usual:.1e}, "
            f"{name} value {size(exact):.1e}"
        )


def root_mean_square(x):
    return x.square().mean().sqrt()


def largest(x):
    return x.abs().max()


def device_of(group):
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_of_errors(dg, exact, heads):
    """The error that a head's sum over dg may have.

    It is six standard deviations of a sum of errors like those of dg, which are equal within a
    chunk. In fp32, 32 roundings of each term are added, as in test_kernels.py, since the ranks cut
    chunks in another way and so have other errors.
    """
    error = dg.double() - exact
    fold = 6 * error.square().mean().sqrt() * (64 * error.numel() / heads) ** 0.5
    if dg.dtype == torch.float32:
        fold += 32 * torch.finfo(dg.dtype).eps * exact.abs().sum()
    return fold


def reason(group, rank):
    return why_not(group)


def need(run, exchange):
    """Skips a test of an exchange that the ranks of `run` do not support."""
    if exchange == "symmetric" and (why := run(reason)[0]):
        pytest.skip(f"no symmetric memory: {why}")


def same_step(group, ranges, make):
    """Asserts that a layer has the same weights after two steps of AdamW on N ranks and on one.

    The layer includes its convolution and the halo.
    """
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
