"""Many rows on Hopper: TMA, wgmma and warp specialization, in Gluon."""
