"""Many rows an expert on Hopper: TMA, wgmma and warp specialization, in Gluon."""
