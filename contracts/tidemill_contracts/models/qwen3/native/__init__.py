"""Dense Qwen3 in bf16 on a CPU with a matrix unit (AMX): a step is one call of a small C++ library.

The library is built from the sources in this folder the first time that a machine needs it. What
it computes is what `kernels` computes over the reference operations, with the residual stream and
everything but the products' inputs in float32; where there is no compiler or no matrix unit, those
run instead.
"""
