"""The stages of the pipeline in plain PyTorch: any device, any dtype, forward and adjoint.

They run on the CPU and are the reference of the kernels. They work in chunk layout,
[NC, HV, C, D] with C = 64 rows a chunk, in the accumulator's dtype (fp32, or fp64 for fp64).
"""
