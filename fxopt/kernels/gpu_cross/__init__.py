"""A layer of a cross network with a vector as its weight, in one launch."""
