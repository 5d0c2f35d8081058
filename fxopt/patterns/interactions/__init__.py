"""Interactions of fields: what is a product of two vectors, whatever way it is written."""
