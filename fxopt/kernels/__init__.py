"""Operators, one folder each: schema, fake, reference, autograd, compiled kernels. They know nothing of graphs."""
