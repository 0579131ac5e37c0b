"""Measurements: paired, repeated, printed as ratios."""
