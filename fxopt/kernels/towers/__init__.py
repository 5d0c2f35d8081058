"""Parallel linears, mixtures of experts and what follows them."""
