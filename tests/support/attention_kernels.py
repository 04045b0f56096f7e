"""Kernels of softmax attention on the CPU, in place of cuDNN's and of PyTorch's flash attention.

PyTorch has both for CUDA alone. These enter its dispatcher with the same signatures and compute in
any dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from fla_cp.kernels.torch import attention, attention_parts, cudnn_attention
from fla_cp.partition.key_rows import Lengths


@contextmanager
def short_parts(least: int) -> Iterator[None]:
    """In the block, cuDNN computes sequences of `least` queries or more, for short tests."""
    pairs = patch.object(attention_parts, "PAIRS", least**2 // 2)
    with patch.object(attention_parts, "LEAST", least), pairs:
        yield


@contextmanager
def kernels_on_cpu() -> Iterator["Kernels"]:
    """In the block, attention on the CPU calls the yielded kernels."""
    found = Kernels()
    runs = patch.object(cudnn_attention, "runs", lambda q, k, v: True)
    refused = patch.object(cudnn_attention, "_refused", set())
    try:
        with patch.object(attention, "flash_runs", lambda q, v: True), runs, refused:
            yield found
    finally:
        found.library._destroy()


class Kernels:
    """Both kernels on the CPU. cudnn, flash: what each was given, the direction with (n, m, causal)
    or with the lengths of queries and keys. error: what cuDNN's stand-in raises, if not None."""

    def __init__(self):
        self.cudnn, self.flash, self.error = [], [], None
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        for name in (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_flash_attention_forward",
            "_flash_attention_backward",
        ):
            kernel = getattr(self, name.replace("_scaled_dot_product", ""))
            self.library.impl(name, kernel)

    def _cudnn(self, direction, *x, causal):
        if self.error is not None:
            raise self.error
        q, k, v = (t[0].transpose(0, 1) for t in x)
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert not causal or len(q) == len(k)
        self.cudnn.append((direction, len(q), len(k), causal))
        return q, k, v, Lengths((len(q),), (len(k),), causal)

    def _cudnn_attention(
        self, q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None
    ):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        q, k, v, lengths = self._cudnn("forward", q, k, v, causal=causal)
        o, lse = attention._torch(q, k, v, lengths, scale)
        state = torch.zeros((), dtype=torch.int64)
        none = torch.empty(0)
        o = o.transpose(0, 1)[None]
        return o, lse[None, ..., None], none, none, len(q), len(k), state, state, none

    def _cudnn_attention_backward(
        self, do, q, k, v, o, lse, seed, offset, bias, cu_q, cu_k, n, m, dropout, causal, *,
        scale=None,
    ):  # fmt: skip
        assert (bias, cu_q, cu_k, dropout) == (None, None, None, 0.0)
        assert lse.shape == (1, q.shape[1], n, 1) and lse.is_contiguous() and m == k.shape[2]
        q, k, v, lengths = self._cudnn("backward", q, k, v, causal=causal)
        do, o = (t[0].transpose(0, 1) for t in (do, o))
        assert do.is_contiguous() and o.is_contiguous()
        found = attention.Attended(o, lse[0, ..., 0])
        grads = attention._torch_bwd(do, q, k, v, found, lengths, scale)
        return tuple(t.transpose(0, 1)[None] for t in grads)

    def _flash_attention_forward(
        self, q, k, v, queries, keys, longest, longest_keys, dropout, causal, debug, *, scale=None,
        **unused,
    ):  # fmt: skip
        lengths = Lengths(*(tuple(x.diff().tolist()) for x in (queries, keys)), causal)
        self.flash.append(("forward", lengths.queries, lengths.keys, causal))
        o, lse = attention._torch(q, k, v, lengths, scale)
        state = torch.zeros(2, dtype=torch.uint64)
        return o, lse, state, state[:0], q.new_empty(0)

    def _flash_attention_backward(
        self, do, q, k, v, o, lse, queries, keys, longest, longest_keys, dropout, causal, state,
        unused, *, scale=None, **more,
    ):  # fmt: skip
        lengths = Lengths(*(tuple(x.diff().tolist()) for x in (queries, keys)), causal)
        self.flash.append(("backward", lengths.queries, lengths.keys, causal))
        found = attention.Attended(o, lse)
        return attention._torch_bwd(do, q, k, v, found, lengths, scale)
