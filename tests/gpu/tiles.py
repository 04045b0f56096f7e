"""The checks of tiles for a GPU: every candidate of `benchmarks.tune`."""

from contextlib import nullcontext

from benchmarks.tune import GROUPED, choice_of, cut_into, forced
from fla_cp.kernels.triton.tile_table import TALL
from tests.gpu.cases import BF16, SAFE, tiles
from tests.gpu.checks import Rows, check_member, one
from tests.support.cases import INSIDE, Case, options
from tests.support.members import Call


def check_tiles(K: int, V: int, share: slice) -> Rows:
    """Every candidate tile; tiles of summaries on sequences in segments of two chunks.

    Kernels that read q and k also run with fewer heads of these than of v, and those of the path of
    a safe gate that are not Triton's also for any gate, whose chunks take both paths. The kernel
    for steep chunks that is not Triton's runs after the one that leaves them out.
    """
    rows = []
    shape = {"T": 300, "H": 2, "HV": 2, "K": K, "V": V}
    grouped = {**shape, "HV": 4}
    for name, stage, tile in [*tiles(K, V)][share]:
        cut = cut_into(2) if "_ends" in stage else nullcontext()
        steep = stage == "intra_any" and tile.folder != "triton"
        with forced(choice_of(stage, tile) | ({"intra": TALL} if steep else {})), cut:
            if "head" in stage or stage.endswith("_concurrent"):
                H = 2 if stage in GROUPED else 4
                rows.append(check_member("gated_delta_rule", K, V, 300, BF16, name=name, H=H))
            if stage.endswith("_own"):
                rows.append(check_own(name, K, V, safe="_any" not in stage))
            if "head" in stage or stage.endswith("_own"):
                continue
            gate = {} if stage.endswith("_any") else SAFE
            inside = {"options": options(**INSIDE, **gate)}
            rows.append(one(K, V, name, Case("tile", **shape, **inside), BF16))
            if stage.startswith("scan"):
                continue
            rows.append(one(K, V, f"{name} groups", Case("tile", **grouped, **inside), BF16))
            if tile.folder != "triton":
                mixed = Case("tile", **grouped, decay=3.5)
                rows.append(one(K, V, f"{name} mixed", mixed, BF16))
                inside = {"options": options(**INSIDE)}
                rows.append(one(K, V, f"{name} any", Case("tile", **grouped, **inside), BF16))
            if steep:
                strong = Case("tile", **grouped, decay=30.0)
                rows.append(one(K, V, f"{name} strong", strong, BF16))
    return rows


def check_own(name: str, K: int, V: int, safe: bool) -> dict:
    """A call of DPLR on the path of a safe gate, or one whose chunks take both paths."""
    decay, options = (2.0, (("safe_gate", True),)) if safe else (7.0, ())
    call = Call(T=300, HV=4, K=K, V=V, decay=decay, options=options)
    return check_member("dplr_delta_rule", K, V, 300, BF16, name=name, call=call)
