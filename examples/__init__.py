"""Runnable examples, benchmarks and tuning tools. Not part of the wheel."""
