"""Many tiles: as many CTAs as run at once, each takes tile after tile."""
