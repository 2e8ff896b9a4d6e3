"""Kernels of ``block_sparse``: x times a weight of which only some blocks are stored."""
