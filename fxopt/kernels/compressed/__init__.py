"""Weights and tables in fewer bits or of lower rank, kept beside the model's own. Opt-in: the answer changes."""
