"""Benchmarks: every contender is verified on the very input it is timed on, and all are timed in turns in one run."""
