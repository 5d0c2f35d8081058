"""Compressed interactions on CUDA: a kernel on tensor cores that never stores the products."""
