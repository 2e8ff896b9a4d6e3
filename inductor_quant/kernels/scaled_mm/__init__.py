"""8-bit x 8-bit GEMMs: int8 (``w8a8``) and FP8 (``fp8``, ``fp8_block``)."""
