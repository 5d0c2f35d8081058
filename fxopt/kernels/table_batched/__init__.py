"""Lookups in tables of 8 bits that lie in one memory, as FBGEMM's table-batched embeddings (TBE) keep them."""
