"""The general kernel: every weight format, any number of rows."""
