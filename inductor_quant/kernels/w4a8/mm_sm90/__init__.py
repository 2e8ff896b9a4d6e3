"""Any packed int4 layout on sm_90, medium M: TMA, and wgmma with W in registers."""
