"""A float activation times a packed weight (``weight_only``)."""
