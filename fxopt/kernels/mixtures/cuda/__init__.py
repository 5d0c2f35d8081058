"""Mixtures of experts on CUDA: a kernel that reads each expert where it lies."""
