"""Compressed interaction: linear maps of the products of two sets of vectors."""
