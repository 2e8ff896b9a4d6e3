"""Measured configurations and the cost model fitted to them."""
