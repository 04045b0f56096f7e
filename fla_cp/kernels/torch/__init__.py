"""The stages of the pipeline in plain PyTorch: any device, any dtype, forward and adjoint.

They are the CPU's engine and the reference of the kernels. Work happens in chunk layout,
[NC, HV, C, D] with C = 64 rows a chunk, in the accumulator's dtype (fp32, or fp64 for fp64).
"""
