"""What runs depends on how many rows there are."""
