"""fxopt::pointwise: a chain of pointwise operators and small reductions in one pass over memory."""
