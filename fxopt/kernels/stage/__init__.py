"""The inputs of a call, copied and padded into the memory that a captured CUDA graph reads, in one launch."""
