"""What fxopt::gpu_few_rows takes."""

MOST_ROWS, MOST_LAYERS = 16, 16  # few_rows.cu's
ALIGNED = 4  # floats that are read at a time
