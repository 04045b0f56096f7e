"""The count of a step's operations, against torch's own counter and against numbers by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fla_cp import build_cp_context
from fla_cp.rule import CHUNK
from fla_cp.train.flops import PEAK_FLOP_S, Meter, needed, peak_of, step_flops, utilisation
from fla_cp.train.mixers import MIXERS
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import parse
from fla_cp.train.pattern import SOFTMAX

VOCABULARY = 96


def model_flags(mixer, *more):
    return [
        *("--mixer", mixer, "--impl", "torch", "--model.layers", "2"),
        *("--model.hidden-size", "48", "--model.num-heads", "3", "--model.head-dim", "16", *more),
    ]


def of_inverse(A, B, *args, out_val=None, **kwargs):
    """Operations of inverting unit triangular matrices [.., C, C], which torch does not count."""
    *batch, C, _ = A
    return int(torch.Size(batch).numel()) * C * (C - 1) * (C - 2) // 3


def counted(config, documents):
    """Operations of a forward and backward by torch's counter."""
    model = build_model(config.model, VOCABULARY, 0)
    offsets = torch.tensor([0, *documents]).cumsum(0)
    context = build_cp_context(offsets, None, conv1d_kernel_size=4)
    tokens = torch.randint(VOCABULARY, (1, sum(documents)))
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: of_inverse}
    )
    with counter:
        model(tokens, context, tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("documents", [[256], [200], [100, 1, 64, 91]], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_formula_counts_what_the_torch_backend_runs(mixer, documents):
    config = parse(model_flags(mixer))
    parts = step_flops(build_model(config.model, VOCABULARY, 0), sum(documents), documents)
    formula = sum(part.executed for part in parts.values())
    # einsum forms the products of a single token without an operation that is counted
    bound = 1e-5 if mixer in SOFTMAX else 1e-6
    assert formula == pytest.approx(counted(config, documents), rel=bound)
    # no part is so small that the bound could not see that it is wrong
    names = ("scores", "operands", "states", "output", "attention")
    operator = sum(parts[n].executed for n in names if n in parts)
    assert operator > 0.1 * formula


@pytest.mark.parametrize("mixer", SOFTMAX)
def test_attention_over_several_blocks_of_queries(mixer):
    """Only the pairs at and below the diagonal are needed."""
    config = parse(model_flags(mixer))
    parts = step_flops(build_model(config.model, VOCABULARY, 0), 700, [700])
    formula = sum(part.executed for part in parts.values())
    assert formula == pytest.approx(counted(config, [700]), rel=1e-6)
    channels = {"attention": 16 + 16, "mla": 24 + 16}[mixer]
    assert parts["attention"].forward == 2 * 3 * 2 * (700 * 701 / 2) * channels


@pytest.mark.parametrize("tied", ["True", "False"])
def test_a_tied_head_counts_like_any_other(tied):
    config = parse(model_flags("kda", "--model.tie-embeddings", tied))
    parts = step_flops(build_model(config.model, VOCABULARY, 0), 128, [128])
    assert parts["head"].needed == 3 * 2 * 128 * 48 * VOCABULARY
    formula = sum(part.executed for part in parts.values())
    assert formula == pytest.approx(counted(config, [128]), rel=1e-6)


def test_kda_by_hand():
    """One layer on the meta device, of the sizes of 340M."""
    config = parse(["--model", "340M", "--model.layers", "1"])
    with torch.device("meta"):
        model = Decoder(config.model, 32000)
    T, D, H, K = 4096, 1024, 8, 128
    parts = step_flops(model, T)
    # q, k, v, output; both low ranks of decay and gate; beta
    weights = 4 * D * D + 2 * (D * K + K * D) + D * H
    assert parts["projections"].forward == 2 * T * weights
    assert parts["ffn"].forward == 2 * T * 3 * D * 2752
    assert parts["head"].forward == 2 * T * D * 32000
    each = H * T // CHUNK
    assert parts["scores"].forward == each * 2 * 64 * 63 * K
    assert parts["operands"].forward == each * 2 * 64 * 64 * (K + K)
    assert parts["states"].forward == each * 2 * 2 * 64 * K * K
    assert parts["output"].forward == each * (2 * 64 * K * K + 2 * 64 * 64 * K)
    assert needed(parts) == sum(p.forward + p.backward for p in parts.values())
    assert needed(parts) < sum(p.executed for p in parts.values())


def test_padding_and_rows_that_nothing_reads_are_not_needed():
    model = build_model(parse(model_flags("gdp")).model, VOCABULARY, 0)
    whole = step_flops(model, 128)
    assert needed(step_flops(model, 129)) == pytest.approx(needed(whole) * 129 / 128)
    padded = step_flops(model, 129, [129])
    assert padded["states"].forward == 5 / 4 * whole["states"].forward  # 2 rows a token
    simple = build_model(parse(model_flags("gdn")).model, VOCABULARY, 0)
    assert whole["output"].needed == step_flops(simple, 128)["output"].needed
    assert whole["states"].needed == 2 * step_flops(simple, 128)["states"].needed


def test_utilisation():
    assert utilisation(989e12, 1.0) == 1.0
    assert utilisation(989e12, 2.0, gpus=4) == 1 / 8
    assert utilisation(5e11, 1.0, peak=1e12) == 0.5


@pytest.mark.parametrize(
    "flags", ["--mixer kda", "--model.pattern kda,attention,mla", "--mixer gdp"]
)
def test_utilisation_of_a_runs_steps(flags):
    """Equal documents stand for all; rows that fill a chunk do not count."""
    sizes = "--model.layers 3 --model.hidden-size 48 --model.num-heads 3 --model.head-dim 16"
    model = build_model(parse(f"{flags} {sizes} --impl torch".split()).model, VOCABULARY, 0)
    lengths = [3 * CHUNK, 3 * CHUNK]
    parts = step_flops(model, 6 * CHUNK, lengths)
    found = Meter(model, 4, 1e9).share(12 * CHUNK, lengths, 0.5)
    assert found == pytest.approx(utilisation(2 * needed(parts), 0.5, 4, 1e9), rel=1e-12)


def test_no_utilisation_without_a_peak_or_a_formula(monkeypatch):
    model = build_model(parse(["--model.layers", "1"]).model, VOCABULARY, 0)
    assert Meter(model, 1, None).share(64, [64], 1.0) is None
    assert peak_of(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr("fla_cp.train.flops._own_mixer", refuse)
    assert Meter(model, 1, 1e9).share(64, [64], 1.0) is None


def refuse(mixer):
    raise ValueError("there is no formula for it")


@pytest.mark.parametrize(
    "name, known",
    [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", False)],
)
def test_the_peak_of_a_gpu(monkeypatch, name, known):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda")
    assert peak_of(gpu, torch.bfloat16) == (PEAK_FLOP_S if known else None)
    assert peak_of(gpu, torch.float32) is None


def test_refusals():
    model = build_model(parse(model_flags("kda")).model, VOCABULARY, 0)
    with pytest.raises(ValueError, match="documents must have 100 tokens in all, got 90"):
        step_flops(model, 100, [50, 40])
    model.blocks[0].mixer = torch.nn.Linear(48, 48)
    with pytest.raises(ValueError, match="no formula for the mixer Linear"):
        step_flops(model, 100)
