"""Many rows an expert on Hopper: the kernel of large M, in Gluon."""
