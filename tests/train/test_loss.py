"""The chunked cross-entropy of the output head, against F.cross_entropy over whole logits."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fla_cp import build_cp_context
from fla_cp.train import loss as module
from fla_cp.train.loss import CHUNK_BYTES, chunk_rows, chunked_cross_entropy
from fla_cp.train.model import build_model
from fla_cp.train.parse import parse
from tests.support.closeness import assert_within_budget

HIDDEN, VOCABULARY = 24, 97
FACTOR = 1 / 7  # of the loss: neither a power of two nor the result of another rounding
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 40 tokens in fp64, 80 in fp32 and 128 in half precision."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * 8 * VOCABULARY * 40)


def drawn(tokens, dtype=torch.float64, ignored=0.2, sharp=1.0, device="cpu", vocabulary=VOCABULARY):
    """x, weight and labels, of which a share is ignored. sharp: the logits' standard deviation."""
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=gen, dtype=torch.float64)
    weight = torch.randn(vocabulary, HIDDEN, generator=gen, dtype=torch.float64)
    weight *= sharp / math.sqrt(HIDDEN)
    labels = torch.randint(vocabulary, (tokens,), generator=gen)
    labels[torch.rand(tokens, generator=gen) < ignored] = -100
    x, weight = (t.to(device, dtype).requires_grad_() for t in (x, weight))
    return x, weight, labels.to(device)


def whole(x, weight, labels):
    """The sum over all logits at once, in float32 or wider."""
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum")


def with_gradients(function, x, weight, labels):
    value = function(x, weight, labels)
    return {"loss": value.detach()} | dict(
        zip(("dx", "dweight"), torch.autograd.grad(value * FACTOR, (x, weight)), strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignored", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("tokens", [0, 1, 39, 40, 41, 160, 199])
def test_equals_the_whole_in_fp64(small_chunks, tokens, ignored, device):
    case = drawn(tokens, ignored=ignored, device=device)
    actual, exact = (with_gradients(f, *case) for f in (chunked_cross_entropy, whole))
    for name, value in exact.items():
        assert actual[name].shape == value.shape and actual[name].dtype == torch.float64, name
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12, msg=name)
    if ignored == 1.0:
        assert not any(value.any() for value in actual.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sharp", [0.5, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 128])
def test_rounds_no_more_than_the_whole(monkeypatch, dtype, sharp, device, rows):
    """Chunks of one token add to the weight's gradient 300 times."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * dtype.itemsize * VOCABULARY * rows)
    case = drawn(300, dtype, sharp=sharp, device=device)
    exact_case = [t.detach().double().requires_grad_() for t in case[:2]]
    exact = with_gradients(whole, *exact_case, case[2])
    actual, baseline = (with_gradients(f, *case) for f in (chunked_cross_entropy, whole))
    assert actual["loss"].dtype == torch.float32
    assert actual["dx"].dtype == actual["dweight"].dtype == dtype
    for name, value in exact.items():
        assert_within_budget(name, actual[name], value, baseline[name])


def test_the_one_is_subtracted_before_rounding():
    """Of an almost certain token, 1 - p is far smaller than a unit of bf16 at 1."""
    logits = torch.tensor([[8.0, 0.0, -1.0]], dtype=torch.bfloat16)
    _, gradient = module._losses_and_gradient(logits, torch.tensor([0]))
    exact = F.softmax(logits.double(), -1)[0, 0] - 1
    assert gradient.dtype == torch.bfloat16
    assert gradient[0, 0].item() == pytest.approx(exact.item(), rel=2**-8)


def test_parts_add_up_to_the_whole(small_chunks):
    x, weight, labels = drawn(199)
    one = with_gradients(chunked_cross_entropy, x, weight, labels)
    sums = dict.fromkeys(("loss", "dweight"), 0.0)
    dx = []
    for part in (slice(0, 0), slice(0, 50), slice(50, 51), slice(51, 199)):
        share = with_gradients(
            chunked_cross_entropy, x.detach()[part].requires_grad_(), weight, labels[part]
        )
        dx.append(share["dx"])
        sums = {name: value + share[name] for name, value in sums.items()}
    for name, value in {**sums, "dx": torch.cat(dx)}.items():
        torch.testing.assert_close(value, one[name], rtol=1e-12, atol=1e-12, msg=name)


def test_an_ignored_row_hides_its_numbers():
    """A row that does not count may hold anything; one that counts makes the loss not finite."""
    x, weight, labels = drawn(6, ignored=0.0)
    with torch.no_grad():
        x[2] = math.nan
    labels[2] = -100
    assert chunked_cross_entropy(x, weight, labels).isfinite()
    labels[2] = 0
    assert not chunked_cross_entropy(x, weight, labels).isfinite()


def test_chunks_fit_their_bytes():
    for tokens, vocabulary, itemsize in [
        (65536, 32000, 2),
        (65536, 32000, 4),
        (1_000_001, 151_936, 2),
        (1, 32000, 2),
        (700, 10**9, 2),
    ]:
        rows = chunk_rows(tokens, vocabulary, itemsize)
        assert rows == 1 or 2 * rows * vocabulary * itemsize <= CHUNK_BYTES
        least = -(-2 * tokens * vocabulary * itemsize // CHUNK_BYTES)
        assert -(-tokens // rows) <= 1.1 * least + 1 or rows == 1  # whole tiles cost 6% of 1766
    assert chunk_rows(65536, 32000, 2) == 8192  # eight equal chunks
    assert chunk_rows(0, 32000, 2) == 1


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an op returns, and the names of all ops."""

    def __init__(self):
        super().__init__()
        self.bytes, self.ops = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.append(func.overloadpacket)
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "loss"])
def test_no_tensor_is_larger_than_a_chunk(monkeypatch, grad):
    tokens, vocabulary = 1000, 500
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * 4 * vocabulary * 130)
    x, weight, labels = drawn(tokens, torch.float32, vocabulary=vocabulary)
    seen = Largest()
    with seen, nullcontext() if grad else torch.no_grad():
        value = chunked_cross_entropy(x, weight, labels)
        if grad:
            value.backward()
    assert 4 * vocabulary * 128 == seen.bytes  # labels [rows, 1] are compared with ids in place
    assert seen.bytes < 4 * vocabulary * tokens / 7
    assert torch.ops.aten._local_scalar_dense not in seen.ops  # the host reads nothing


def test_products_are_computed_once(small_chunks):
    x, weight, labels = drawn(199)
    one = 2 * 199 * HIDDEN * VOCABULARY

    def products(x, weight, backward=True):
        with FlopCounterMode(display=False) as counter:
            value = chunked_cross_entropy(x, weight, labels)
            if backward:
                value.backward()
        return counter.get_total_flops() / one

    assert products(x, weight) == 3
    assert products(x.detach(), weight) == products(x, weight.detach()) == 2
    assert products(x.detach(), weight.detach(), backward=False) == 1
    with torch.no_grad():
        assert products(x, weight, backward=False) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_loss_alone(small_chunks, mode):
    case = drawn(199)
    with mode():
        value = chunked_cross_entropy(*case)
    assert not value.requires_grad
    torch.testing.assert_close(value, whole(*case).detach(), rtol=1e-12, atol=0)


@pytest.mark.bits
@pytest.mark.parametrize("device", DEVICES)
def test_the_incoming_gradient_is_not_rounded(device):
    """1 + 2^-8 is 1 in bf16: rounded first, it would shift all gradients by one factor."""
    x, weight, labels = drawn(50, torch.bfloat16, device=device)
    (once,) = torch.autograd.grad(chunked_cross_entropy(x, weight, labels), x)
    (more,) = torch.autograd.grad(chunked_cross_entropy(x, weight, labels) * (1 + 2**-8), x)
    assert torch.equal(more, (once.float() * (1 + 2**-8)).bfloat16())
    assert not torch.equal(more, once)


def test_a_graph_can_be_used_twice_if_it_is_kept():
    x, weight, labels = drawn(50)
    value = chunked_cross_entropy(x, weight, labels)
    value.backward(retain_graph=True)
    once = x.grad.clone()
    value.backward()
    torch.testing.assert_close(x.grad, 2 * once, rtol=1e-15, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    square = chunked_cross_entropy(x, weight, labels).square()
    (dx,) = torch.autograd.grad(square, x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@pytest.mark.parametrize("tied", ["True", "False"])
def test_gradients_of_a_decoder(tied):
    flags = ["--model.layers", "1", "--model.hidden-size", "32", "--model.num-heads", "2"]
    flags += ["--model.head-dim", "16", "--model.tie-embeddings", tied]
    context = build_cp_context(torch.tensor([0, 50, 70]), None, conv1d_kernel_size=4)
    tokens = torch.randint(64, (1, 70), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1).masked_fill(torch.arange(70) % 7 == 6, -100)
    results = []
    for chunked in (True, False):
        model = build_model(parse(flags).model, 64, 0).double()
        if chunked:
            value = model(tokens, context, labels)
        else:
            value = F.cross_entropy(model(tokens, context)[0], labels[0], reduction="sum")
        value.backward()
        results.append({"loss": value.detach()} | {n: p.grad for n, p in model.named_parameters()})
    assert ("head.weight" in results[0]) == (tied == "False")
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("setting", ["device", "dtype", "autocast"])
def test_settings_of_torch_change_nothing(small_chunks, setting):
    case = drawn(199, torch.float32)
    exact = with_gradients(chunked_cross_entropy, *case)
    dtype = torch.get_default_dtype()
    try:
        if setting == "device":
            torch.set_default_device("meta")
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16) if setting == "autocast" else nullcontext():
            actual = with_gradients(chunked_cross_entropy, *case)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-6)


def test_compiled_pointwise_part_has_two_graphs(small_chunks, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        module, "_pointwise", lambda function, device: torch.compile(function, backend=counter)
    )
    for tokens in (120, 199, 75, 42):  # chunks of 40, 39, 35 and 2 tokens
        case = drawn(tokens)
        actual, exact = (with_gradients(f, *case) for f in (chunked_cross_entropy, whole))
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 2


# torch 2.13: inductor imports torch.jit.script_method
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_inductor_compiles_the_pointwise_part(small_chunks, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(module, "_pointwise", lambda function, device: torch.compile(function))
    case = drawn(199)
    actual, exact = (with_gradients(f, *case) for f in (chunked_cross_entropy, whole))
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


def test_where_the_pointwise_part_is_compiled(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    function = module._losses
    monkeypatch.delenv(module.COMPILE, raising=False)
    monkeypatch.setattr(module, "_has_triton", lambda: True)
    assert module._pointwise(function, cpu) is function
    assert module._pointwise(function, cuda) is module._compiled(function) is not function
    monkeypatch.setenv(module.COMPILE, "0")
    assert module._pointwise(function, cuda) is function
    monkeypatch.setenv(module.COMPILE, "1")
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    assert module._pointwise(function, cuda) is function


def test_refusals():
    x, weight, labels = drawn(10)
    for arguments, message in [
        ((x, weight[:, 1:], labels), r"hidden\], got \(10, 24\) and \(97, 23\)"),
        ((x[None], weight, labels), r"x must be \[T, hidden\] .* got \(1, 10, 24\)"),
        ((x, weight.float(), labels), "one floating dtype, got torch.float64 and torch.float32"),
        ((x, weight, labels[1:]), r"labels must be int64 of shape \(10,\), got torch.int64 of"),
        ((x, weight, labels.int()), "labels must be int64 .*, got torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            chunked_cross_entropy(*arguments)
    for label in (-1, VOCABULARY):
        with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
            chunked_cross_entropy(x, weight, labels.index_fill(0, torch.tensor([3]), label))


@NEEDS_GPU
def test_products_are_added_in_float32_on_a_gpu():
    """In either of the two ways. Rounded to bf16, total would stay 1."""
    a = torch.full((16, 64), 2.0**-10, device="cuda", dtype=torch.bfloat16)
    total = torch.ones(16, 16, device="cuda")
    module._add_product(total, a, a.t())
    torch.testing.assert_close(total, 1 + (a.double() @ a.double().t()).float(), rtol=0, atol=1e-7)
    mine = total.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_adds_in_float32", lambda device, dtype: False)
        module._add_product(mine, a, a.t())
    torch.testing.assert_close(mine, 1 + 2 * (total - 1), rtol=0, atol=1e-7)


@NEEDS_GPU
def test_the_host_never_waits_on_a_gpu(small_chunks):
    case = drawn(300, torch.bfloat16, device="cuda")
    with_gradients(chunked_cross_entropy, *case)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(chunked_cross_entropy, *case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
