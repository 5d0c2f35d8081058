"""Computations that a loop repeats over slices, lookups or weights: trees of lanes, and which work row by row."""
