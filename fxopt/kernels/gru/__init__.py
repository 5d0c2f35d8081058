"""Gated recurrent units over sequences."""
