"""What the numbers of a result file are, in words: its "unit", which docs/performance.md shows."""

from __future__ import annotations

DEVICE = "milliseconds of the GPU, medians; peak memory includes the inputs"

OPS = (
    DEVICE + ". host_ms is the time until a call returns, when the GPU may still be at work. "
    "chained_host_ms is this time for one of {chain} calls that share one backward, as in a model. "
    "one_thread_host_ms is this time if the backward runs on the calling thread, as in the "
    "trainer, and not on autograd's own. Names with steady_ are of calls that follow each other, "
    "with no wait for the GPU between them; one_core: all threads of the process share one core of "
    "the host. bare_ms is the time in which the host launches the "
    "same kernels and does nothing else; for bare_autograd_ms, it launches those of the backward "
    "in a backward of autograd. peak_gib is the most GPU memory in use, in GiB"
)
"""Of `benchmarks.ops`; {chain}: how many calls share a backward."""

STEPS = "milliseconds of a step, of steps that follow each other without a pause"
CALLS = "milliseconds of a call, of calls that follow each other without a pause; medians"
HYBRID = STEPS + "; medians, of the slowest rank"
EXCHANGE = "microseconds of an exchange, medians of 60"
DECAYS = (
    "milliseconds of the GPU, medians. Everything is timed in several turns, and each turn has a "
    "number. Differences from our results are relative and in norms: that of o, and the largest "
    "one of a gradient"
)
DECODE = (
    "milliseconds of a step, medians. graph is the GPU's time for a step in a CUDA graph. loop is "
    "the time of a step on the wall clock if the host reads each token. Bytes of a step and "
    "bandwidth are counted in GB, 10^9 bytes"
)
EXAMPLE = (
    "tokens/s, the median of all steps but the first; peak_gib is the most memory in use on the "
    "first GPU, in GiB"
)
FIRST_CALL = "seconds from the start of a call until the GPU has finished it"
PACKINGS = (
    "milliseconds on the wall clock for a forward and a backward; the host waits for the GPU only "
    "once, after all timed calls"
)
LAYER_HOST = (
    "milliseconds of the host until a call returns, medians; the GPU has no work left before a call"
)
RECALL = (
    "share of right answers by length and depth; training_s is the wall time of the whole command "
    "that trains, in seconds, and cpu_s its processor time, summed over all cores"
)
REMAT = (
    "milliseconds of the GPU and of the host, medians; peak_gib is the most GPU memory in use, in "
    "GiB, with weights and input"
)
TRAIN = (
    "tokens/s of all GPUs together at the median step. host_ms is the time until the host has made "
    "all calls of a step. MFU is the share of {tflop_s} TFLOP/s a GPU that the model's own "
    "operations reach"
)
"""Of `benchmarks.train`; {tflop_s}: the peak that counts as 1."""

_EARLIER = {
    "ms, median of do_bench; peak_gib includes the inputs": "milliseconds of the GPU, medians of "
    "Triton's do_bench; peak memory includes the inputs",
    "ms a step, steps back to back": STEPS,
    "ms of a call, calls back to back, medians": CALLS,
    "ms of a step, steps back to back, medians, of the slowest rank": HYBRID,
    "microseconds, medians of 60": EXCHANGE,
    "ms of the device, medians, one number for each turn; differences from our results: relative, "
    "in norms, of o and the largest one of a gradient": DECAYS,
    "ms of a step, medians; graph: of the device; loop: of the wall clock, the host reading each "
    "token; bytes of a step and bandwidth are counted in GB": DECODE,
    "tokens/s: the median of all steps but the first; peak_gib: of the first GPU": EXAMPLE,
    "seconds of the host until the GPU is done": FIRST_CALL,
    "ms of wall clock for a forward and a backward; the device is waited for once, at the "
    "end": PACKINGS,
    "ms of the host, medians; nothing is queued on the device before a call": LAYER_HOST,
    "share of right answers by length and depth; training_s, cpu_s: wall time of the whole command "
    "that trains, and its processor time over all cores": RECALL,
    "ms of the device and of the host, medians; peak_gib: with weights and input": REMAT,
    "tokens/s over all GPUs at the median step; host_ms: until the calls of a step return; MFU of "
    "989 TFLOP/s a GPU": TRAIN.format(tflop_s=989),
}
"""Texts of result files that earlier versions of the benchmarks wrote."""


def shown(unit: str) -> str:
    """The text for docs/performance.md, where columns have other names than in files of
    `benchmarks.ops` and the section explains them."""
    unit = unit.strip().rstrip(".")
    if unit.startswith((DEVICE, "ms of the device, medians; host_ms: until the call returns")):
        return DEVICE
    return _EARLIER.get(unit, unit)
