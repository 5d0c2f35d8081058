"""Chains of linear layers in one call, with what follows each in place."""
