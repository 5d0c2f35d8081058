"""Operators: one folder each, with schema, fake, reference, autograd and compiled kernels. They know nothing of graphs."""
