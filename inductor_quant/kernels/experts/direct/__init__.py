"""The kernel for few rows an expert."""
