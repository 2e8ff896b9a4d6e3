"""Many rows on Hopper: TMA, wgmma and warp specialisation, in Gluon."""
