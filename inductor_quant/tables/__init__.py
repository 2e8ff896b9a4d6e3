"""Integer vectors of a module that a compilation reads as constants, and what keeps them true."""
