"""The kernel for few rows of x: blocks go from memory to the registers that multiply them."""
