"""The weight of a product: how its elements are stored, and the steps that make it real."""
