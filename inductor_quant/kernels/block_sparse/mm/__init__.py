"""The general kernel: fp16 and bf16, every block, every M."""
