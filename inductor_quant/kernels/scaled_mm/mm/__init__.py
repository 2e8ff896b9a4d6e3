"""The general kernels: one CTA a tile, any strides."""
