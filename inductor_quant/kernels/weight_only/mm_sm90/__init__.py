"""More rows, every weight format, on sm_90: W goes through registers to wgmma."""
