"""Scales of groups along K, many rows, on Hopper: the output transposed."""
