"""Benchmarks of GEMMs and models against other systems."""
