"""What kernels of several families have in common."""
