"""The first launch of a call compiles what the whole call needs, side by side.

Nothing is compiled in earnest: a function that takes a moment replaces Triton's. test_launch.py
runs this file in a process of its own, whose kernels are not interpreted.
"""

import io
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.compiler
from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fla_cp
from benchmarks.tune import now
from fla_cp import custom_op_cp
from fla_cp.kernels import rehearsal, using
from fla_cp.kernels.triton import compiling, streams
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton.backend import TritonBackend
from fla_cp.kernels.triton.intra_channelwise_bwd_scores import beta_bwd_kernel
from fla_cp.ops import family
from tests.support.driver import Sm90Driver
from tests.support.ranks import run_threads

D = 128
SAFE = {"safe_gate": True, "lower_bound": -5.0}
INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Kernel:
    """What the replaced compiler returns; a launch does nothing."""

    function = packed_metadata = None

    def __init__(self, src):
        self.src, self.metadata = src, SimpleNamespace(hash=src.name)

    def launch_metadata(self, *given):
        return None

    def run(self, *given):
        pass

    def __getitem__(self, grid):
        return lambda *given, **named: None


class Compiler:
    """Replaces `triton.compiler.compile`. compiled: (kernel, thread) in order. most: how many ran
    at once; each waits until it is at least `least`. fails: names of kernels that raise. takes:
    seconds."""

    def __init__(self):
        self.compiled, self.fails, self.most, self.running = [], (), 0, 0
        self.changed, self.least, self.takes = threading.Condition(), 1, 0.0

    def __call__(self, src, target=None, options=None, _env_vars=None):
        with self.changed:
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.most >= self.least, 60)
        time.sleep(self.takes)
        with self.changed:
            self.running -= 1
            self.compiled.append((src.name, threading.current_thread().name))
        if src.name in self.fails:
            raise RuntimeError(f"cannot compile {src.name}")
        return Kernel(src)

    def count(self):
        """How many were compiled since the last call of this."""
        found, self.compiled = len(self.compiled), []
        return found


def forget():
    """Makes Triton and the launches forget what was compiled."""
    launches._known.clear()
    for name, module in list(sys.modules.items()):
        for x in vars(module).values() if name.startswith("fla_cp.kernels") else ():
            if isinstance(x, JITFunction):
                x.device_caches.clear()


@pytest.fixture
def compiler(monkeypatch):
    found, active, backend = Compiler(), driver._active, now()
    monkeypatch.setattr(triton.compiler, "compile", found)
    monkeypatch.setenv("FLA_CP_COMPILE_THREADS", "8")
    start = streams.start
    monkeypatch.setattr(  # there is no second stream on a CPU
        streams, "start", lambda *given, concurrent: start(*given, concurrent=False)
    )
    forget()
    driver.set_active(Sm90Driver())
    backend = replace(backend, tuning=replace(backend.tuning, sms=132, architecture=90))
    with using(backend), using(replace(backend, name="torch")):  # tensors are on the CPU
        yield found
    driver._active = active
    forget()


def operands(T, H=4, *, head=False, offset=0, grad=True):
    """Inputs whose memory is never touched. offset: elements by which they miss an alignment."""

    def leaf(*shape, dtype=torch.bfloat16):
        n = torch.Size(shape).numel()
        return torch.empty(n + offset, dtype=dtype)[offset:].view(shape).requires_grad_(grad)

    channels = () if head else (D,)
    x = [leaf(1, T, H, D) for _ in "qkv"] + [leaf(1, T, H, *channels), leaf(1, T, H)]
    rates = {"A_log": leaf(H, dtype=torch.float32)}
    rates["dt_bias"] = leaf(H * (1 if head else D), dtype=torch.float32)
    return x, rates


def call(name, x, rates, **options):
    options = SAFE | options if name == "kda" and options.pop("safe", True) else options
    return getattr(fla_cp, f"chunk_{name}")(*x, **rates, **INSIDE, **options)


def backward(o, x, *more):
    torch.autograd.grad(o, [*x, *more], torch.empty_like(o))


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("T", [512, 8192, 65536], ids=["whole", "cut", "long"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("kda", {}),
        ("kda", {"safe": False}),
        ("kda", {"disable_recompute": True, "output_final_state": True}),
        ("kda", {"cu_seqlens": (0, 100, 100, 300, 1.0)}),
        ("gated_delta_rule", {}),
        ("gated_delta_rule", {"precision": "high", "state_v_first": True}),
    ],
    ids=["safe", "any", "kept", "packed", "head", "high"],
)
def test_the_first_launch_compiles_what_forward_and_backward_launch(
    compiler, name, options, T, offset
):
    options = dict(options)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor([*options["cu_seqlens"][:-1], T])
    compiler.least = 4
    x, rates = operands(T, head=name != "kda", offset=offset)
    o, _ = call(name, x, rates, **options)
    assert len(compiler.compiled) >= 6
    assert all(thread.startswith("fla_cp-compile") for _, thread in compiler.compiled)
    compiler.count()
    backward(o, x, *rates.values())
    assert compiler.count() == 0


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("lengths", [(8192, 65536, 16383, 9000), (65536, 8192, 32768, 20000)])
def test_another_length_compiles_nothing(compiler, name, lengths):
    """Not even where one length is cut into segments and another one is whole."""
    for n, T in enumerate(lengths):
        x, rates = operands(T, H=32, head=name != "kda")
        o, _ = call(name, x, rates)
        backward(o, x, *rates.values())
        assert (compiler.count() > 0) == (n == 0), (T, compiler.compiled)


def test_an_initial_state_too(compiler):
    x, rates = operands(8192)
    state = torch.empty(1, 4, D, D).requires_grad_()
    o, _final = call("kda", x, rates, initial_state=state, output_final_state=True)
    assert compiler.count() >= 10
    torch.autograd.grad(o, [*x, state], torch.empty_like(o))
    assert compiler.count() == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_with_its_backward(compiler, bias):
    x = torch.empty(1, 100, 256, dtype=torch.bfloat16).requires_grad_()
    weight = torch.empty(256, 4, dtype=torch.bfloat16).requires_grad_()
    more = torch.empty(256, dtype=torch.bfloat16).requires_grad_() if bias else None
    y = fla_cp.causal_conv1d(x, weight, more, activation="silu", impl="triton")
    assert sorted(name for name, _ in compiler.compiled) == ["conv_bwd_kernel", "conv_kernel"]
    y.backward(torch.empty_like(y))
    assert len(compiler.compiled) == 2


def test_without_gradients_the_forward_alone_is_compiled(compiler):
    x, rates = operands(8192, grad=False)
    call("kda", x, rates)
    forward = compiler.count()
    x, rates = operands(8192)
    o, _ = call("kda", x, rates)
    assert compiler.count() == 0  # nothing is missing, so nothing is rehearsed
    backward(o, x)
    assert compiler.count() > forward > 2


def test_one_thread_compiles_at_each_launch(compiler, monkeypatch):
    monkeypatch.setenv("FLA_CP_COMPILE_THREADS", "1")
    x, rates = operands(8192)
    o, _ = call("kda", x, rates)
    forward = compiler.count()
    backward(o, x)
    assert compiler.most == 1 and forward > 2 and compiler.count() > 2
    monkeypatch.setenv("FLA_CP_COMPILE_THREADS", "none")
    forget()
    with pytest.raises(ValueError, match=r"FLA_CP_COMPILE_THREADS must be .* got 'none'"):
        call("kda", x, rates)


def test_the_callers_own_mode_is_left_alone(compiler):
    x, rates = operands(512)
    with ThreadPoolExecutor(1, "mine") as pool, AsyncCompileMode(pool):
        call("kda", x, rates)
    assert compiler.compiled and all(t.startswith("mine") for _, t in compiler.compiled)


def test_a_kernel_that_fails_raises_where_it_is_launched(compiler):
    compiler.fails = ("safe_bwd_kernel",)
    x, rates = operands(512)
    o, _ = call("kda", x, rates)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot compile safe_bwd_kernel"):
            backward(o, x)
    compiler.fails = ("intra_kernel",)
    forget()
    with pytest.raises(RuntimeError, match="cannot compile intra_kernel"):
        call("kda", x, rates)


def test_python_may_miscount_the_depth_of_syntax_trees():
    """As Python 3.11.7 does when threads parse at the same time."""
    calls = []

    def parse(error: str, times: int, inside: bool = False) -> str:
        calls.append(error)
        if len(calls) <= times:
            if inside:  # as Triton does for a function that the kernel calls
                raise RuntimeError("at 13:10") from SystemError(error)
            raise SystemError(error)
        return "kernel"

    miscounted = "AST constructor recursion depth mismatch (before=36, after=91)"
    most = compiling.PARSES - 1
    assert compiling._parsed(lambda: parse(miscounted, most)) == "kernel" and len(calls) == most + 1
    calls.clear()
    assert compiling._parsed(lambda: parse(miscounted, most, True)) == "kernel"
    calls.clear()
    with pytest.raises(SystemError, match="mismatch"):
        compiling._parsed(lambda: parse(miscounted, most + 1))
    calls.clear()
    with pytest.raises(SystemError, match="null argument"):
        compiling._parsed(lambda: parse("null argument to internal routine", 1))
    with pytest.raises(RuntimeError, match="13:10"):
        compiling._parsed(lambda: parse("null argument to internal routine", 2, True))
    assert len(calls) == 2


def test_a_rehearsal_that_fails_costs_time_only(compiler, monkeypatch, caplog):
    monkeypatch.setattr(TritonBackend, "rehearsing", lambda self, device: 1 / 0)
    x, rates = operands(512)
    o, _ = call("kda", x, rates)
    assert "could not be rehearsed" in caplog.text
    forward = compiler.count()
    backward(o, x)
    assert forward > 1 and compiler.count() > 2


def test_other_threads_launch_meanwhile(compiler):
    """A launch of another thread, while a call is rehearsed, is a launch."""
    kernels, inside, go_on = [], threading.Event(), threading.Event()

    def rehearse():
        inside.set()
        assert go_on.wait(60)

    def other():
        assert inside.wait(60)
        call("gated_delta_rule", *operands(512, head=True, grad=False))
        kernels.extend(name for name, _ in compiler.compiled)
        go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    with rehearsal.announced(rehearse):
        launches.launch(beta_bwd_kernel, (1,), *beta_arguments())
    thread.join()
    assert {"intra_head_kernel", "scan_kernel"} <= set(kernels)
    assert rehearsal.take() is None


def beta_arguments():
    beta = torch.empty(16, 4)
    return beta, torch.empty(2, 16, 4), beta, 64, 4, 1.0, 4, 2, True, False, 1024


@pytest.fixture
def told_apart(compiler, monkeypatch):
    """`launched` and `rehearsed` hold what this thread has launched and what rehearsals of its
    calls have."""

    def same(self, key, signature, device, constants, options, attributes, warmup):
        return f"{self.__name__} {key}"

    mine = threading.local()

    def record(kernel, grid, *given, **named):
        if (rehearse := rehearsal.take()) is not None:
            mine.launched, launched = mine.rehearsed, mine.launched
            rehearse()
            mine.launched = launched
        mine.launched.add(kernel.run(*given, grid=grid, warmup=True, **named))

    monkeypatch.setattr(JITFunction, "_do_compile", same)
    monkeypatch.setattr(launches, "runner", record)
    return mine


@pytest.mark.parametrize("tokens", [192, 4096, 16384])
@pytest.mark.parametrize("scheme", ["all_gather", "ring", "scan", "heads"])
def test_a_rehearsal_launches_what_a_rank_launches(told_apart, scheme, tokens):
    """One document on three ranks: each has its own kernels, and the rehearsal sends nothing."""

    def rank(group, rank):
        told_apart.launched, told_apart.rehearsed = set(), set()
        context = fla_cp.build_cp_context(torch.tensor([0, 3 * tokens]), group, exchange=scheme)
        x, rates = operands(tokens)
        o, _ = call("kda", x, rates, cp_context=context)
        assert len(told_apart.rehearsed - told_apart.launched) > 4
        backward(o, x)
        late = told_apart.launched - told_apart.rehearsed
        # the other schemes fold fewer maps at a time, or those of fewer heads
        assert all(name.startswith("fold_kernel") for name in late), late
        assert scheme != "all_gather" or not late

    run_threads(rank, 3)


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("tokens", [192, 4096, 16384])
def test_the_ops_of_a_compiled_block_rehearse_what_a_rank_launches(
    told_apart, monkeypatch, name, tokens
):
    """The exchange is between two ops; the first one of each direction compiles for both."""

    def gathered(x, world_size, group_name):
        sent.append(x)
        return x.new_empty(world_size, *x.shape)

    sent = []
    monkeypatch.setattr(custom_op_cp, "traced_all_gather", gathered)
    traced = partial(family._traced, rows=1)
    monkeypatch.setattr(f"fla_cp.ops.{name}.chunk", traced)

    def rank(group, rank):
        told_apart.launched, told_apart.rehearsed = set(), set()
        context = fla_cp.build_cp_context(torch.tensor([0, 3 * tokens]), group)
        x, rates = operands(tokens, head=name != "kda")
        o, _ = call(name, x, rates, cp_context=context)
        forward = set(told_apart.launched)
        assert len(forward) > 2 and not forward - told_apart.rehearsed
        backward(o, x)
        assert len(told_apart.launched) > len(forward) + 2
        assert not told_apart.launched - told_apart.rehearsed

    run_threads(rank, 3)
    assert len(sent) == 3 * 2  # ranks and directions


def test_progress_is_said_once_in_a_while(compiler, monkeypatch, capfd):
    monkeypatch.setattr(compiling, "QUIET_S", 0.0)
    compiler.takes = 0.6
    call("kda", *operands(512))
    said = capfd.readouterr().err
    assert re.fullmatch(r"fla_cp: compiling \d+ of \d\d kernels\n", said), said
    for name, value in (("FLA_CP_COMPILE_PROGRESS", "0"), ("RANK", "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            forget()
            call("kda", *operands(512))
        assert capfd.readouterr().err == ""


def test_progress_on_a_terminal_leaves_nothing(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    said = compiling._Progress()
    for done in (1, 2):
        said.show(done, 12)
    said.close()
    *lines, last = sys.stderr.getvalue().split("\r")
    assert lines == ["", *(f"fla_cp: compiling {n} of 12 kernels" for n in (1, 2)), " " * 33]
    assert last == ""


def test_progress_leaves_bars_intact(monkeypatch):
    tqdm = pytest.importorskip("tqdm").tqdm
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with tqdm(total=3, file=out):
        compiling._Progress().show(3, 12)
    assert "\rfla_cp: compiling 3 of 12 kernels\n" in re.sub(" +(?=\r)", "", out.getvalue())
