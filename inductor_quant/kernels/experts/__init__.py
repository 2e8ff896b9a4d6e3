"""Kernels of the ``experts`` family: each row of x times the quantized weight of its expert."""
