"""fxopt::k_largest on CUDA, without gradients."""
