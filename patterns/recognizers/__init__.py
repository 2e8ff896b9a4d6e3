"""One recognizer for each meaning of a quantized GEMM."""
