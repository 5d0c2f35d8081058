"""What to find: one file a pattern. Patterns know shapes and aliases; they never edit a graph."""
