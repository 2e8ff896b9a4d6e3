"""The kernels for 8-bit rows and weights."""
