"""What happened to each GEMM, why, and how close its kernel runs to the hardware's limits.

events (collected during compilations), explain, roofline; the commands doctor, which and codes.
"""
