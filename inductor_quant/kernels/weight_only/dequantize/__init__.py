"""Writes W once, for a GEMM of the library."""
