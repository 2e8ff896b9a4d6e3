"""9 to 32 rows and wide N on Hopper: wgmma with swap_ab."""
