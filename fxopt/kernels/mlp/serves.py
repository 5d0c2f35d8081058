"""Which linear layers each kernel serves."""

from __future__ import annotations

# chains.cu's: outputs of a layer, inputs of a first one, which a block reads all by itself, and chains of a launch
MOST_OUT, MOST_IN, MOST_CHAINS = 128, 1024, 12
# few_rows.cu's: rows, layers, and floats that are read at a time
MOST_ROWS, MOST_LAYERS, VECTOR = 16, 16, 4
# linear.cu's: the longest short dot product, and the shortest long one
SHORT_IN, LONG_IN = 64, 1024
