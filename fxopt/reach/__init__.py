"""What Python code can reach besides its arguments. Bounded: what lies deeper than anybody looks is not found."""
