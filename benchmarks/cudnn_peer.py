"""KDA of cuDNN's front end on Hopper, as a peer: nvidia-cudnn-frontend 1.32.0 (CUDA_HOME: a CUDA
toolkit; NVRTC compiles its kernels in the first call).

What is timed is its own kernels alone, on operands that are made before:

- forward: one launch, with norm, gate and beta's sigmoid inside it, on q, k and v in bf16, and raw
  g and raw beta in fp32, which its kernel wants (our inputs in bf16, cast). It writes o and the
  last state.
- backward: its launches, which recompute what they need of the forward. They take normalised q and
  k, log decays and beta after its sigmoid, since the Hopper backward goes through no norm, gate or
  sigmoid. These operands are formed in torch beforehand, and the gradients that the launches leave
  are those of these operands. So neither forming them nor going back through norm, gate and sigmoid
  is in its times, while it is in ours.

For the comparison of results, torch forms the gradients of our inputs from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.members import Member, log_decay
from benchmarks.shapes import LOWER_BOUND

EVERYTHING_INSIDE = 7
"""The launch's flags for a norm, a safe gate and a sigmoid inside."""

NORM_EPS = 1e-6


class Cudnn:
    """One call's operands and results. x: the inputs of KDA as `members.draws` makes them."""

    def __init__(self, member: Member, x: dict[str, Tensor], do: Tensor) -> None:
        from cudnn.linear_attention.hopper import cuda_bwd_host, cuda_host

        self.host, self.bwd_host, self.x = cuda_host, cuda_bwd_host, x
        q, k, v, g, beta = (x[n][0] for n in ("q", "k", "v", "g", "beta"))
        (T, H, K), device = q.shape, q.device
        if K != 128 or v.shape[2] != 128 or q.shape != k.shape or v.shape != q.shape:
            raise ValueError(
                "cuDNN's kernels take K = V = 128 and as many heads of q and k as of v"
            )
        self.sizes = T, H
        single = {"dtype": torch.float32, "device": device}
        self.cu_seqlens = torch.tensor([0, T], dtype=torch.int32, device=device)
        self.zero, self.last, self.first = (torch.zeros(1, H, K, K, **single) for _ in range(3))
        self.raw = [t.detach() for t in (q, k, v)] + [g.detach().float(), beta.detach().float()]
        self.rates = [x[n].detach() for n in ("A_log", "dt_bias")]
        self.o = torch.empty_like(self.raw[2])
        self.do = do[0].contiguous()
        with torch.enable_grad():
            self.formed = (
                *map(normalized, (q, k)),
                log_decay(member, x)[0],
                beta.float().sigmoid(),
            )
        q_n, k_n, log, b = (t.detach() for t in self.formed)
        self.given = [q_n.to(q.dtype), k_n.to(q.dtype), self.raw[2], log, b]
        self.grads = [torch.empty_like(t) for t in self.given]
        size = cuda_bwd_host.workspace_bytes(T, H, 1)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def forward(self) -> tuple[Tensor, ...]:
        T, H = self.sizes
        tensors = *self.raw, self.cu_seqlens, self.zero, self.o, self.last
        where, bound = self._where(), (LOWER_BOUND, EVERYTHING_INSIDE)
        self.host.launch(*where, *addresses(tensors), T, 1, H, *addresses(self.rates), *bound)
        return (self.o,)

    def both(self) -> tuple[Tensor, ...]:
        (T, H), (o,) = self.sizes, self.forward()
        tensors = self.workspace, self.do, *self.given, self.cu_seqlens, self.zero, self.zero
        results = *self.grads, self.first
        self.bwd_host.launch(*self._where(), *addresses((*tensors, *results)), T, H, 1)
        return (o, *self.grads)

    def results(self) -> tuple[Tensor, ...]:
        """o and the gradients of the inputs, in their order."""
        o, dq, dk, dv, dg, dbeta = self.both()
        inputs = {n: t for n, t in self.x.items() if n != "v"}
        outer = dq.float(), dk.float(), dg, dbeta
        found = torch.autograd.grad(self.formed, list(inputs.values()), outer, retain_graph=True)
        grads = dict(zip(inputs, found, strict=True)) | {"v": dv[None]}
        return (o[None], *(grads[n] for n in self.x))

    def _where(self) -> tuple[int, int]:
        """The number of the device, and the current stream's address."""
        return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def normalized(x: Tensor) -> Tensor:
    """x, fp32, over its norm in the last dimension."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def addresses(tensors: list[Tensor] | tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)
