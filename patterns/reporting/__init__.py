"""What a report says about a graph. Nothing here decides about a GEMM."""
