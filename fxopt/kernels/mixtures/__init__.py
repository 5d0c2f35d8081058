"""Mixtures of experts: sums that a softmax weighs."""
