"""The choice of tiles: a table of measured rows, and rules for what was not measured.

Nothing is tuned at run time. `python -m benchmarks.tune` measures a row's candidates again and
prints them."""

import functools
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fla_cp.rule import CHUNK


class Tile(NamedTuple):
    """BK, BV: sizes of the key and value tile. warps, stages: those of the compiled kernel.
    registers: the largest number that a thread may have, or None. folder: the kernel's folder in
    kernels/."""

    BK: int
    BV: int
    warps: int
    stages: int
    registers: int | None = None
    folder: str = "triton"


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n, at least `least` (the smallest dot)."""
    size = least
    while size < n:
        size *= 2
    return size


BF16 = torch.bfloat16
TABLE: dict[tuple[int, str, int, int, torch.dtype], Tile] = {
    (90, "intra", 128, 128, BF16): Tile(32, 0, 4, 3),
    (90, "intra_any", 128, 128, BF16): Tile(32, 0, 4, 1),
    (90, "intra_any_own", 128, 128, BF16): Tile(32, 0, 4, 1),
    (90, "gated", 128, 128, BF16): Tile(64, 0, 4, 1),
    (90, "scan", 128, 128, BF16): Tile(128, 32, 4, 3),
    (90, "scan_states", 128, 128, BF16): Tile(128, 32, 4, 3),
    (90, "scan_ends", 128, 128, BF16): Tile(128, 32, 4, 3),
    (90, "scan_bwd", 128, 128, BF16): Tile(128, 32, 4, 3),
    (90, "scan_bwd_ends", 128, 128, BF16): Tile(128, 32, 4, 3),
    (90, "scan_states_concurrent", 128, 128, BF16): Tile(128, 64, 4, 3),
    (90, "scan_bwd_concurrent", 128, 128, BF16): Tile(128, 64, 4, 3),
    (90, "scan_bwd_ends_concurrent", 128, 128, BF16): Tile(128, 64, 4, 3),
    (90, "scores_bwd", 128, 128, BF16): Tile(0, 128, 4, 1),
    (90, "scores_bwd_head", 128, 128, BF16): Tile(0, 128, 8, 1),
    (90, "intra_bwd", 128, 128, BF16): Tile(32, 64, 4, 3),
    (90, "intra_bwd_any", 128, 128, BF16): Tile(32, 128, 4, 1),
    (90, "intra_head", 128, 128, BF16): Tile(64, 0, 4, 3, 168),
    (90, "dqk_head", 128, 128, BF16): Tile(32, 64, 4, 2),
    (90, "dq_head", 128, 128, BF16): Tile(128, 128, 4, 1),
    (90, "dk_head", 128, 128, BF16): Tile(64, 128, 4, 1),
}
"""Measured tiles by (compute capability, stage, K, V, dtype), with K and V rounded up to powers of
two. Stages end in "_any" without a safe gate, "_head" with one decay a head, "_states" if a scan
does not write o, "_ends" if it summarizes, "_concurrent" if two scans run at the same time, "_two"
if a kernel sums both dk and dp over a group, and "_own" if p reads the state with a decay a
channel. "_by_chunk" is the first of two kernels with any gate, for the chunks that are not steep,
where it has a tile of its own. docs/log.md has the figures."""

FULL_V_MIN_CHAINS = 128
"""From this many (head, segment) chains on, one program covers all of V."""

TILES_BY_CHAINS: dict[tuple[int, str, int, int, torch.dtype], tuple[tuple[int, Tile], ...]] = {
    (90, "scan", 128, 128, BF16): ((FULL_V_MIN_CHAINS, Tile(128, 128, 8, 2)),),
    (90, "scan_states", 128, 128, BF16): ((64, Tile(128, 64, 4, 3)),),
    (90, "scan_ends", 128, 128, BF16): (
        (FULL_V_MIN_CHAINS, Tile(128, 64, 4, 2)),
        (64, Tile(128, 64, 4, 3)),
    ),
    (90, "scan_bwd", 128, 128, BF16): ((FULL_V_MIN_CHAINS, Tile(128, 128, 8, 2)),),
    (90, "scan_bwd_ends", 128, 128, BF16): (
        (FULL_V_MIN_CHAINS, Tile(128, 128, 8, 2)),
        (64, Tile(128, 64, 4, 2)),
    ),
}
"""Wider tiles for scans with at least that many chains (heads times segments). All value tiles of a
chain read the same operands, so that wider tiles read them less often; with so many chains the GPU
is full nevertheless."""


NARROW, DEEP = Tile(128, 64, 4, 2, folder="sm90"), Tile(128, 64, 4, 3, folder="sm90")
BROAD = Tile(128, 128, 8, 2, folder="sm90")
WHOLE = Tile(128, 128, 8, 1, folder="sm90")
TALL, TALL_BWD = Tile(128, 0, 4, 1, 168, folder="sm90"), Tile(64, 128, 4, 1, folder="sm90")
"""The safe path of the channelwise local stage, forward and backward."""
QUARTERS_BWD = TALL_BWD._replace(stages=2)
"""TALL_BWD with a reference for each quarter of a chunk, which its stages tell. With any gate, its
kernel then serves more chunks."""
STEEP = Tile(128, 0, 4, 1, 168, folder="sm90")
"""The path of any gate of the channelwise local stage, forward."""
SCORES_BWD = Tile(0, 128, 4, 1, 168, folder="sm90")
"""The gradients of the channelwise scores."""
IN_SCANS = Tile(128, 64, 4, 3, folder="sm90")
"""As the tile of "gated", it lets the scans of a backward gate q, k and g themselves. It is also
that of these scans, which have more stages if they only compute states."""
SM90_TILES: dict[str, tuple[tuple[int, Tile], ...]] = {
    "scan": ((128, BROAD), (64, NARROW), (0, DEEP)),
    "scan_head": ((256, BROAD), (0, DEEP)),
    "scan_head_own": ((128, BROAD), (0, NARROW)),
    "scan_bwd_head": ((128, NARROW), (0, DEEP)),
    "scan_bwd_head_own": ((0, NARROW),),
    "scan_kept": ((0, NARROW),),
    "scan_states": ((0, DEEP),),
    "scan_ends": ((128, BROAD), (0, DEEP)),
    "scan_bwd": ((0, NARROW),),
    "scan_bwd_ends": ((128, BROAD), (0, DEEP)),
    "scan_states_concurrent": ((0, NARROW),),
    "scan_bwd_concurrent": ((0, NARROW),),
    "scan_bwd_ends_concurrent": ((0, NARROW),),
    "intra": ((0, TALL),),
    "intra_any": ((0, STEEP),),
    "gated": ((0, IN_SCANS),),
    "scores_bwd": ((0, SCORES_BWD),),
    "intra_bwd": ((0, TALL_BWD),),
    "intra_bwd_by_chunk": ((0, QUARTERS_BWD),),
    "intra_head": ((0, Tile(128, 0, 4, 1, folder="sm90")),),
    "scores_bwd_head": ((0, WHOLE),),
    "dqk_head": ((0, WHOLE),),
    "dq_head": ((0, WHOLE),),
    "dk_head": ((0, WHOLE),),
}
"""Tiles of the kernels of sm90/, for K = V = 128. Scans have one for at least that many chains, as
measured; "_kept" writes o, states and v_new at once, "_head" has one decay a head, and "_head_own"
p as well, with which three stages do not fit into shared memory. For the local stages an entry
only says that a kernel exists: one for the forward, and one for all stages of the backward
together."""


GENERATION_TILES = {"sm90": SM90_TILES}
"""Tiles by the folder of the kernels."""


def rule(stage: str, k: int, v: int, wide: bool) -> Tile:
    """The tile of a shape that was not measured. It fits registers and shared memory of sm_90."""
    stage = stage.removesuffix("_concurrent")
    if stage in ("intra_own", "intra_any_own"):
        return Tile(16, 0, 4, 1 if wide else 3)
    if stage in ("intra_bwd_own", "intra_bwd_any_own"):
        return Tile(16, min(v, 32 if wide else 128), 4, 1)
    if stage in ("intra", "intra_any", "intra_head"):
        narrow = stage == "intra_any" and (wide or k <= 64)
        return Tile(16 if narrow else 32, 0, 4, 1 if wide else 3)
    if stage == "gated":
        return Tile(min(k, 32 if wide else 64), 0, 4, 1)
    if stage == "recurrent":  # 32 elements of the fp32 state a thread: 8 loads of 16 bytes
        return Tile(k, min(v, 4096 // k), 4, 1)
    if stage.startswith("scores_bwd"):
        return Tile(0, min(v, (32 if stage == "scores_bwd_head" else 16) if wide else 64), 4, 1)
    if wide and stage.startswith(("dk_head", "dqk_head")):
        return Tile(16, 16, 4, 1)
    if stage in ("dq_head", "dk_head"):
        return Tile(min(k, 32 if wide else 64), min(v, 32 if wide else 64), 4, 1)
    if stage == "dk_head_two":
        return Tile(min(k, 32), min(v, 64), 4, 1)
    if stage.startswith("dqk_head"):
        return Tile(min(k, 32), min(v, 64), 4, 2)
    if stage in ("intra_bwd", "intra_bwd_any"):
        return Tile(16 if k <= 64 or wide else 32, min(v, 32 if wide else 128), 4, 1)
    if wide:
        # A slice of the state has as many keys as wgmma has rows. For 16 keys it is mma.sync, with
        # which ptxas miscompiles the reverse scan.
        return Tile(64, 16, 4, 1)
    if k > 128:
        return Tile(k, min(v, 16 if stage.startswith("scan_bwd") else 32), 8, 1)
    return Tile(k, min(v, 32), 4, 3)


@functools.cache
def architecture() -> int:
    """Compute capability of the first GPU as 10 * major + minor; 90 without one."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 0 for another device."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def memory_speed(device: torch.device) -> float:
    """Bytes a second that a GPU's memory can transfer by its clock and width: 3.35e12 of an H100,
    4.9e12 of an H200. Infinite if PyTorch does not tell."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock, width = (getattr(known, f"memory_{n}", 0) for n in ("clock_rate", "bus_width"))
    return 2e3 * clock * width / 8 or math.inf


@functools.cache
def _tile(
    architecture: int, stage: str, k: int, v: int, dtype: torch.dtype, chains: int, folder: str
) -> Tile:
    for least, tile in GENERATION_TILES.get(folder, {}).get(stage, ()):
        if chains >= least:
            return tile
    stage = stage.removesuffix("_kept").replace("_by_chunk", "")
    key = (architecture, stage, k, v, dtype)
    for least, fuller in TILES_BY_CHAINS.get(key, ()):
        if chains >= least:
            return fuller
    row = TABLE.get(key)
    return rule(stage, k, v, dtype == torch.float32) if row is None else row


@dataclass(frozen=True)
class Tuning:
    """What decides which kernel a stage runs, and with which tile. The backend of a plan holds one.

    forced: tiles of some stages, by name, which precede every other choice. That of "intra_bwd" is
        also for "intra_bwd_by_chunk", and those of "scan" and "scan_bwd" for stages that begin with
        "scan_head" and "scan_bwd_head".
    gluon: whether the kernels of sm90/ run; None: if they support the call.
    min_chunk_heads: its scans run only for more chunks times heads than this.
    min_local_chunk_heads: that number for the channelwise local stage, and for all stages with one
        decay a head; it counts if it is the smaller one.
    architecture: compute capability, 10 * major + minor; None: that of the GPU.
    sms: streaming multiprocessors; None: those of the GPU.
    memory: bytes a second that the GPU's memory transfers; None: those of the GPU.
    later_share, later_least: the chunks that no summary reads may be formed after the others, while
        these are summarized. That is done if they are more than one in later_share of all chunks
        and, times heads, more than later_least.
    """

    forced: tuple[tuple[str, Tile], ...] = ()
    gluon: bool | None = None
    min_chunk_heads: int = 512
    min_local_chunk_heads: int = 64
    architecture: int | None = None
    sms: int | None = None
    memory: float | None = None
    later_share: int = 4
    later_least: int = 2048

    def tile(
        self,
        stage: str,
        K: int,
        V: int,
        dtype: torch.dtype,
        chains: int = 0,
        folder: str = "triton",
    ) -> Tile:
        """The tile of a stage for one shape and operand dtype. chains: of a scan, how many there
        are. folder: whose kernels run it."""
        common = stage.partition("_head")[0] if stage.startswith("scan") else stage
        for name, forced in self.forced:
            if name in (stage, stage.replace("_by_chunk", ""), common):
                return forced
        on = architecture() if self.architecture is None else self.architecture
        if on != 90 and self.architecture is None:
            _warn_unmeasured()
        return _tile(on, stage, power_of_two(K), power_of_two(V, 32), dtype, chains, folder)

    def sm_count(self, device: torch.device) -> int:
        return sm_count(device) if self.sms is None else self.sms

    def memory_speed(self, device: torch.device) -> float:
        return memory_speed(device) if self.memory is None else self.memory

    def on_sm90(self) -> bool:
        return (architecture() if self.architecture is None else self.architecture) == 90


@functools.cache
def _warn_unmeasured() -> None:
    """Warns once a process."""
    warnings.warn(
        f"fla_cp's tiles were measured on compute capability 9.0 (H100, H200); on "
        f"{torch.cuda.get_device_name()} ({architecture() / 10}) the Triton kernels run with tiles "
        "by rule: results are the same, speed is not known",
        stacklevel=2,
    )


TUNING = Tuning()


def in_chunks_of(tokens: int, stage: str, t: Tile, terms: int = 1) -> Tile:
    """The tile of a scan or of a local backward stage in chunks of so many tokens. terms: of T and
    Aqk, for a scan.

    A scan of short chunks loads nothing ahead: nearly all have one step. Products of so few rows
    are no wgmma, and threads hold more of their operands: wider tiles would spill."""
    if tokens == CHUNK:
        return t
    if stage.startswith("scan"):
        narrow = t.BK > 128 or tokens * terms > 32
        return t._replace(BV=16 if narrow else t.BV, stages=1)
    return t._replace(BK=max(16, t.BK * 16 // tokens), BV=min(t.BV, 32))


def in_two_terms(stage: str, t: Tile) -> Tile:
    """The tile of a scan whose T and Aqk have two terms. These would not fit into shared memory
    with three stages (with the kernels of sm90/ only in the reverse scan and in one that writes o),
    and wider tiles would spill."""
    back = stage.startswith("scan_bwd")
    if t.folder != "triton":
        return NARROW if t == DEEP and (back or stage == "scan") else t
    most, warps = 32 if back else 64, 4 if t.BV > 64 else t.warps
    return Tile(t.BK, min(t.BV, most), warps, min(t.stages, 2))
