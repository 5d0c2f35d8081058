"""Attention of a row to the positions of its sequence, scored by a small network (DIN)."""
