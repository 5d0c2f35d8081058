"""Pairs of fields picked by index tensors."""
