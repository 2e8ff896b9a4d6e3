"""Products as the graph has them: by one op, as a sum, padded, behind an opaque op."""
