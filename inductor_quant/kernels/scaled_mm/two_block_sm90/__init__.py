"""FP8 blocks, few tiles and a short K: two blocks of K a step."""
