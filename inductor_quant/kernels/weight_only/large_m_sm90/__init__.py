"""Many rows on Hopper, 4-bit packed along K: TMA and warp specialization."""
