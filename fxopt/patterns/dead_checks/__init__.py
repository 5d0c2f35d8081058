"""Checks that are proved to change nothing: one file a family, proofs.py is what they work with."""
