"""Embedding columns: index program > lookup > pooling > collector, one file a step."""
