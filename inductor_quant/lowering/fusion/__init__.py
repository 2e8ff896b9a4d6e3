"""Lowerings of the ops of ``ops/fusion``."""
