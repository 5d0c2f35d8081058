"""Interactions of fields: dot products of their pairs, and sums over pairs."""
