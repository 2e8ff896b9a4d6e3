"""Kernels of ``w4a8``: int8 activations times packed int4 weights, on the int8 matrix units."""
