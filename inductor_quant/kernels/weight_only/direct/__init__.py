"""Few rows, every weight format: W goes straight to the registers that multiply it."""
