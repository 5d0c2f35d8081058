"""Where other systems meet fxopt."""
