"""Linear layers on a GPU where cuBLAS leaves it idle: few rows of long dot products, and single outputs."""
