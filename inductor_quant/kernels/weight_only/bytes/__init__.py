"""int8, fp8 and nibbles of bytes, up to 128 rows."""
