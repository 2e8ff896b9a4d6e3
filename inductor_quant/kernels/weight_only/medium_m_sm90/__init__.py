"""17 rows and more on Hopper, 4-bit packed along K."""
