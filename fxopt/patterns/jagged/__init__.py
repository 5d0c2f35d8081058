"""Jagged tensors: which ids of many features that lie back to back a tensor holds, by the lengths of their bags."""
