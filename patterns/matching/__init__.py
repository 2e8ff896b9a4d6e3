"""What surrounds a product: activations, scales, zero points, epilogues; operands of the op."""
