"""What runs the rules: transactions and trials of rewrites, and the last spelling of a finished graph."""
