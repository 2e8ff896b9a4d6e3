"""Statements that read and dequantize a tile of a weight, made from its ``WeightFormat``."""
