"""The k largest numbers along a dim."""
