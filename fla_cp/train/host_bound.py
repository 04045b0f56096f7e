"""Notices that the GPU waits for the host in every step, and says once what may help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fla_cp.train.config import TrainConfig, UserError
from fla_cp.train.device_rules import check_graphs
from fla_cp.train.distributed import Ranks
from fla_cp.train.rules import validate
from fla_cp.train.step import MicroBatch
from fla_cp.train.token_layout import layout_of

FIRST = 10
"""Steps of a process that are not judged: they compile, and one of them may capture a graph."""

IN_A_ROW = 10
"""How many steps the GPU must have waited."""

SHARE = 0.98
"""The host's share of the GPU's time from which the GPU is taken to wait. Where the GPU is behind,
the host also waits now and then, until there is room for its launches: up to 0.95 was measured."""


class HostBound:
    """Watches the steps of a run."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.steps = self.waited = self.documents = 0
        self.packing: list[list[int]] | None = None
        self.alike, self.said = True, False

    def note(
        self, batches: Sequence[MicroBatch], host_ms: float, device_ms: float | None, captured: bool
    ) -> str | None:
        """A line for the user, once in a run: after IN_A_ROW steps in which the GPU waited.

        batches: of this step. host_ms, device_ms: as in `Metrics`. captured: whether there is a
        CUDA graph.
        """
        if self.said or device_ms is None:
            return None
        packing = [batch.share.cu_seqlens.tolist() for batch in batches]
        self.alike &= self.packing in (None, packing) and all(p == packing[0] for p in packing)
        self.packing = packing
        self.documents = max([self.documents, *(len(offsets) - 1 for offsets in packing)])
        self.steps += 1
        waits = host_ms >= SHARE * device_ms and not captured
        self.waited = self.waited + 1 if waits and self.steps > FIRST else 0
        if self.waited < IN_A_ROW:
            return None
        self.said = True
        flags = self._flags()
        faster = f", and {flags} may make steps faster" if flags else ""
        return (
            f"note: the GPU waits for the host, which took {host_ms:.0f} of {device_ms:.0f} ms in "
            f"this step: more tokens per rank would take little longer{faster}"
        )

    def _flags(self) -> str | None:
        """Flags that let this run use a CUDA graph, if there are any."""
        config, parallel = self.config, self.config.parallel
        if parallel.cuda_graphs == "off" or config.model.folder is not None:
            return None
        if parallel.cuda_graphs == "on" and (self.alike or config.data.max_documents is not None):
            return None
        flags, data = "--cuda-graphs on", config.data
        if not self.alike:
            most = self.documents + self.documents // 4  # packs with more run without the graph
            flags, data = f"{flags} --data.max-documents {most}", replace(data, max_documents=most)
        changed = replace(config, parallel=replace(parallel, cuda_graphs="on"), data=data)
        if not self.alike and parallel.cp > 1 and layout_of(changed) != "contiguous":
            return None  # a graph for all packings needs one range of tokens per rank
        try:
            validate(changed)
            check_graphs(changed, self.ranks)
        except UserError:
            return None
        return flags
