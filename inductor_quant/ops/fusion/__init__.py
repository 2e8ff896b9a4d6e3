"""Ops that the passes of ``patterns/fusion`` write: quantization, and several GEMMs as one."""
