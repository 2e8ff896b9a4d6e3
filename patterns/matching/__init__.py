"""Shared by recognizers: products, weights, scales, zero points and epilogues."""
