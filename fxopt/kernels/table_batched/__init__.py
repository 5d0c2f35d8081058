"""Lookups in tables of 2 to 32 bits that lie in one memory, as FBGEMM's table-batched embeddings (TBE) keep them."""
