"""Decode (M <= 16), 4-bit packed along K: the warps of a CTA split K."""
