"""The boundary: every private symbol of torch and Triton that this package uses."""
