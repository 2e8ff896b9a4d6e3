"""Tools that measure tile configurations."""
