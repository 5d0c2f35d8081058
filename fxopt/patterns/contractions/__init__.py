"""Sums of products over named axes, however they are spelled."""
