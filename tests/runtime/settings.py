"""Settings in a module of the user's, as forwards read them."""

ENABLED = False
FACTORS = [1.0]
