"""A tile of any format in registers, with one dimension for each digit of an index."""
