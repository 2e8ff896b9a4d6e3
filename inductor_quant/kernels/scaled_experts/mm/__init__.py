"""FP8 and int8, any number of rows."""
