"""Whether the scans of a backward gate q, k and g themselves, with one decay a channel.

Triton's scans never do, but those of a generation's folder may. Otherwise `gated_operands` forms
what they read. The tile of the stage "gated" decides."""

from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.device.bundles import gate
from fla_cp.kernels.triton.generations import GENERATIONS, choose, kernels_of
from fla_cp.kernels.triton.operands import DENSE, Chunks, Gating
from fla_cp.kernels.triton.tile_table import Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule


def on_inputs(packing: Packing, x: Inputs, c: Chunks) -> Chunks | None:
    """c on q, g and k, if the scans gate these; otherwise None. Raises ValueError if a forced tile
    cannot be used."""
    q, g, k = map(unit_rows, (x.q, x.g, x.k))
    c = c._replace(qg=q, k_decayed=g, kg=k)
    folder = choose(packing, c, c.v)
    if folder != "triton" and kernels_of(folder).scan_gated.why_not(c.rule, x):
        folder = "triton"
    t = c.tuning.tile("gated", q.shape[2], c.v.shape[2], c.v.dtype, 0, folder)
    if t.folder == "triton":
        return None
    kernels = kernels_of(t.folder)
    reason = kernels.scan_gated.why_not(c.rule, x)
    if not reason and not kernels.supports(c, c.v):
        reason = "the inputs are not bf16 tensors that the TMA can read"
    if reason:
        raise ValueError(f"the tile {t} of stage gated cannot be used: {reason}")
    return c._replace(gating=Gating(gate(c.rule, x), t.folder))


def may_gate(rule: DeltaRule, x: Inputs, tuning: Tuning) -> bool:
    """Whether `on_inputs` takes such inputs, if they are enough and the kernels can read them where
    they are. A compiled graph knows neither."""
    K, V, dtype = x.q.shape[2], x.v.shape[2], x.v.dtype
    return any(
        generation.possible(tuning, dtype)
        and not generation.scan_gated.why_not(rule, x)
        and tuning.tile("gated", K, V, dtype, 0, generation.FOLDER).folder != "triton"
        for generation in GENERATIONS
    )


def readable(c: Chunks, do: Tensor) -> Tensor:
    """do, or a copy, such that the scans can read it."""
    if c.gating is None or kernels_of(c.gating.folder).supports(c, do):
        return do
    return do.clone(memory_format=DENSE)
