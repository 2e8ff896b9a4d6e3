"""The general kernel: every form of the op, every M."""
