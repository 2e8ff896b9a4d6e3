"""17 to 256 rows on Hopper, 4-bit packed along K."""
