"""Dot products of all pairs of a sample's vectors on tensor cores, in one row with what stands before them."""
