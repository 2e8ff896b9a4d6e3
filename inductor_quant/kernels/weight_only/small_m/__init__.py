"""Up to 32 rows, any packed layout: W is the first operand (swap_ab)."""
