"""benchmarks.tune without a GPU: what it times has the tile that it names, and the table takes the
rows that it prints."""

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

import triton

from benchmarks import tune
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import intra
from fla_cp.kernels.triton.tile_table import TABLE, TUNING, Tile
from fla_cp.partition.packing import Packing

# products of pairs that are masked away later may overflow; numpy warns of it
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered", "invalid value encountered")
]

F32 = torch.float32
K, V, HEADS = 16, 32, 1


@pytest.fixture
def interpreted(monkeypatch):
    """Lets kernels run on CPU tensors, and fp32 take the path of bf16 for a safe gate, too."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(bundles, "SAFE_DTYPES", (F32, torch.bfloat16))
    remembered = bundles.rule_options, bundles.local_paths
    for one in remembered:
        one.cache_clear()
    yield
    for one in remembered:
        one.cache_clear()


@pytest.fixture
def forget_tiles():
    """Lets the table be read again, before and after a test that changes it."""
    tile_table._tile.cache_clear()
    yield
    tile_table._tile.cache_clear()


@pytest.mark.parametrize("stage", tune.OWN)
def test_a_stage_of_dplr_is_timed_with_the_tile_that_is_named(stage, interpreted, monkeypatch):
    seen = []

    def watch(kernel, grid, *given, **named):
        if "S" in named:
            seen.append((kernel.__name__, named["S"], named["R"], named["num_warps"]))
        kernel[grid](*given, **named)

    def once(run, **how):
        monkeypatch.setattr(launches, "runner", watch)
        run()
        return 1.5

    monkeypatch.setattr(triton.testing, "do_bench", once)
    tile = Tile(16, 32, 2, 2)
    assert tune.measure(stage, tile, K, V, F32, 128, HEADS) == 1.5
    safe, backward = "_any" not in stage, "bwd" in stage
    wanted = ("safe_bwd_kernel" if safe else "intra_bwd_kernel") if backward else "intra_kernel"
    found = [(S, warps) for name, S, R, warps in seen if name == wanted and R.SAFE is safe]
    assert [((S.BK, S.BV, S.NS), warps, S.REMOVAL) for S, warps in found] == [((16, 32, 2), 2, "p")]


@pytest.mark.parametrize("safe", [True, False])
def test_chunks_take_the_path_that_is_timed(safe, interpreted):
    def random(*shape):
        return torch.randn(*shape)

    rule, x = tune.rows_of_dplr(random, 80, (1, HEADS), K, V, safe=safe)
    assert x.q.shape == (160, 1, K) and x.v.shape == (160, HEADS, V)
    c = intra(rule, Packing.build((0, 160)), x)
    if safe:
        assert c.steep.numel() == 0 and x.g.min() >= -5.0
    else:
        assert (c.steep == 1).all() and c.steep.numel() == 3 * HEADS


def test_states_of_the_inputs_stay_bounded(interpreted, monkeypatch):
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    for path in ("_own", "_any_own"):
        stages = tune.stages(16, 32, F32, 256, 1, path=path)
        o, *_ = stages["scan"]()
        assert o.isfinite().all() and o.abs().max() < 100


@pytest.mark.parametrize("stage", tune.STAGES)
def test_the_table_takes_the_row_that_is_printed(stage, monkeypatch, capsys, forget_tiles):
    tried = []

    def measure(of, tile, *shape):
        assert of == stage
        tried.append(tile)
        if len(tried) == 1:
            raise RuntimeError
        return 2.0 + len(tried)

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "architecture", lambda: 90)
    tune.main(["--stage", stage])
    assert tuple(tried) == tune.candidates(stage, 128, 128)
    *_, last = capsys.readouterr().out.splitlines()
    table, _, entry = last.strip().partition(": ")
    ((given, row),) = eval(f"{{{entry}}}", {"Tile": Tile, "torch": torch}).items()
    folder = "triton"
    if table == "TABLE":
        monkeypatch.setitem(TABLE, given, row)
    else:
        folder, before = "sm90", getattr(tile_table, table)
        monkeypatch.setitem(before, given, row)
    assert TUNING.tile(stage, 128, 128, torch.bfloat16, folder=folder) == tried[1]
