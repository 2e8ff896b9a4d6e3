"""Sentence search with a quantized model, with or without a GPU."""
