"""Steps with and without CUDA graphs on a GPU, compared: `python -m tests.support.graphs FLAGS`.

With --cuda-graphs auto, packs are one document each, and a graph must be captured.
"""

import sys
import tempfile
from pathlib import Path

import torch

from tests.support.loops import steps_taken

MODEL = [
    *("--model.layers", "2", "--model.hidden-size", "128", "--model.num-heads", "2"),
    *("--seq-len", "512", "--global-batch-size", "2", "--device", "cuda"),
    *("--max-steps", "10", "--eval-every", "5", "--eval-batches", "1"),
]


def main(flags: list[str]) -> None:
    if "--dtype" not in flags:
        flags = [*flags, "--dtype", "float32"]
    rounded = "bfloat16" in flags  # there flash attention adds in no fixed order, either
    with tempfile.TemporaryDirectory() as folder:
        if auto := "auto" in flags:
            text = Path(folder, "long.txt")
            text.write_text("one long document " * 10000)
            flags = [*flags[2:], "--data", f"text:{text}"]
        rest = [flag for flag in flags if not flag.startswith("--data.max")]
        plain, weights, _ = steps_taken(
            MODEL, f"{folder}/plain", "--cuda-graphs", "off", *rest, steps=10
        )
        rows, found, graphs = steps_taken(
            MODEL, f"{folder}/graphs", "--cuda-graphs", "auto" if auto else "on", *flags, steps=10
        )
    assert graphs.graphs
    for mine, theirs in zip(rows, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert abs(a - b) <= (3e-2 if rounded else 1e-3) * abs(b), (rows, plain)
    for a, b in zip(found, weights, strict=True):
        if rounded:
            assert (a - b).norm() <= 0.1 * b.norm()
        else:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    print(f"{len(graphs.graphs)} graphs, equal steps")


if __name__ == "__main__":
    main(sys.argv[1:])
