"""The general kernel: every weight format, every M."""
