"""Up to 8 rows: the weight goes straight from memory to registers."""
