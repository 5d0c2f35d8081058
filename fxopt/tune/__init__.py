"""The cost model: what a rewrite takes away and what it adds, timed on this machine at the batch sizes that matter."""
