"""More than 32 rows, any packed layout."""
