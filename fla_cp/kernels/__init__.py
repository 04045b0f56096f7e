"""Triton kernels. Importing this package needs Triton; `fla_cp` itself does not."""
