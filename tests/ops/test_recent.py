"""What calls remember is bounded, and what is in use is not forgotten for what passes by."""

import dataclasses
import threading

import pytest
import torch

from fla_cp import chunk_kda, custom_op
from fla_cp.kernels import TORCH, using
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.nn import GatedDeltaNet, one_call
from fla_cp.nn.whole_layer import Facts
from fla_cp.ops import known
from fla_cp.ops.known import known_calls
from fla_cp.program import Program
from fla_cp.recent import Recent
from fla_cp.rule import DeltaRule


class Recorded(type(TORCH)):
    """The torch stages as a backend whose calls are replayed."""

    def replay_stream(self, device):
        return 0


RECORDED = Recorded(**{f.name: getattr(TORCH, f.name) for f in dataclasses.fields(TORCH)})
CACHES = known_calls, one_call._known, custom_op._replayed


@pytest.fixture(autouse=True)
def forget():
    for cache in CACHES:
        cache.clear()
    with using(RECORDED):
        yield
    for cache in CACHES:
        cache.clear()


def test_what_was_not_used_for_longest_is_forgotten():
    found = Recent(3)
    for n in range(3):
        found.keep(n, str(n))
    assert found.use(0) == "0" and found.use(9) is None
    found.keep(2, "two")
    found.keep(3, "3")
    assert dict(found.items()) == {0: "0", 2: "two", 3: "3"}
    assert found.use(1) is None and len(found) == 3
    assert [*found.values()] == ["0", "two", "3"]  # looking at them is no use
    found.keep(4, "4")
    assert found.use(0) is None
    found.clear()
    assert len(found) == 0 and found.use(4) is None


def test_threads_share_it():
    """Threads keep and use values at once, and none sees another key's value or too many."""
    found, wrong = Recent(8), []

    def work(own):
        for n in range(3000):
            key = own, n % 11
            value = found.use(key)
            if value not in (None, key):
                wrong.append(value)
            found.keep(key, key)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(found) <= 8


def test_an_operator_in_use_stays_known():
    def call():
        x = [torch.randn(1, 3, 1, 8) for _ in range(4)]
        return chunk_kda(*x, torch.rand(1, 3, 1))

    for _ in range(3):
        call()
    ((_, mine),) = known_calls.items()
    facts = {"want_final": False, "want_h": False}
    for n in range(known.MAX_KNOWN + 200):
        known.remember(("other", n), mine.rule, mine.backend, **facts)
        if n % 100 == 0:
            call()
    assert mine in known_calls.values() and len(known_calls) == known.MAX_KNOWN
    assert len(mine.kind.forward.known) == 1
    assert isinstance(*mine.kind.forward.known.values(), Program)


def test_a_layer_in_use_stays_known():
    layer = GatedDeltaNet(40, 2, 8, head_v_dim=8)
    x = torch.randn(1, 3, 40)
    layer(x)
    (mine,) = one_call._known.values()
    facts = Facts(2, 2, 8, 8, True, 1.0, None, layer.qkv_conv.kernel_size, 1e-5, "silu", "auto")
    for n in range(one_call.MAX_KNOWN + 200):
        one_call._call(facts._replace(eps=float(n)), x, layer.qkv_conv.weight, None)
        if n % 100 == 0:
            layer(x)
    assert mine in one_call._known.values() and len(one_call._known) == one_call.MAX_KNOWN


def test_an_op_of_a_compiled_graph_in_use_keeps_its_program():
    ran: list[float] = []
    inputs = Inputs(*(torch.randn(3, 1, 8) for _ in range(4)), None, None, None)
    fixed = custom_op.constants(DeltaRule(scale=1.0), "auto", None, 1, 3)
    call, _ = custom_op.Call.parse((*inputs, None, *fixed))

    def run(scale):
        def result():
            ran.append(scale)
            return [torch.ones(2) * scale]

        own = dataclasses.replace(call, rule=call.rule._replace(scale=scale))
        return own.replayed("forward", result, (torch.randn(2),))

    for n in range(custom_op.MAX_REPLAYED + 200):
        run(float(n))
        if n % 100 == 0:
            run(-1.0)
    assert ran.count(-1.0) == 2 and ran.count(1.0) == 1
    assert len(custom_op._replayed) == custom_op.MAX_REPLAYED
