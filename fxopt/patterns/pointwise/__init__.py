"""Chains of pointwise operators, broadcasts and small reductions that one pass over memory can compute."""
