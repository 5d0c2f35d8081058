"""Dot products of pairs of a sample's vectors on a GPU, in one row with what stands before them."""
