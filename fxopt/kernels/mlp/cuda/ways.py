"""By which way a linear layer x [M, K] by weight [N, K] is fastest, as an H200 measured it.

Figures are microseconds with the 0.4 to the next kernel, ours and then cuBLAS's, both with a ReLU, at the sizes that
were timed.
"""

from __future__ import annotations

import torch

from ..serves import LONG_IN, SHORT_IN

HALVES = (torch.float16, torch.bfloat16)
ALIGNED = 8  # halves: 16 bytes
ALIGNED_FLOATS = 4
_SHORT_OUT = 1024
# Of layers in parts: the fewest inputs, the fewest rows, and the most rows x outputs. The first that fits counts.
_IN_FULL = ((4096, 8, 2**20), (1024, 8, 2**19), (512, 32, 2**17), (LONG_IN, 32, 2**16))
_IN_TF32 = ((4096, 2, 2**18), (1024, 2, 2**16))
FEWEST_ROWS, MOST_ROWS = 32, 512  # of a layer of several pieces that goes in parts; chosen around what was timed
_ODD_IN = 128
SLICED, MOST_BLOCKS = 32, 264  # rows and outputs of a block; two blocks a multiprocessor of 132


def is_short(dtype: torch.dtype, M: int, N: int, K: int) -> bool:
    """Whether our own launch wins.

    fp32: 256 x 32 by 32 1.9 and 3.7, 2048 x 32 by 128 3.0 and 3.4, by 512 5.2 and 4.6, 256 x 64 by 128 2.7 and 3.9, and
    a row of 64 2.4 and 2.1; bf16: 2048 x 13 by 512 2.7 and 4.3, 2048 x 32 by 128 2.6 and 3.0, by 512 4.0 and 3.5.
    """
    if not 0 < K <= SHORT_IN or not 1 < N <= _SHORT_OUT:
        return False
    if dtype in HALVES:
        return K <= 16 or (K <= 32 and (K % 2 == 1 or M * N <= 2**18))
    return K <= 16 or (M * N * K <= 2**23 and (K <= 32 or M > 16))


def is_row(M: int, N: int, K: int) -> bool:
    """Whether dot products one by one win.

    fp32: a row of 1024 by 128 2.0 and 4.6, by 1024 2.7 and 2.9, of 512 by 512 1.8 and 3.3, of 8152 by 1024 5.9 and 9.0,
    of 128 by 4096 2.7 and 2.5; bf16: 1024 by 1024 2.2 and 7.5.
    """
    return M == 1 and K > 0 and (N <= 2048 or K > 256)


def is_long(dtype: torch.dtype, M: int, N: int, K: int) -> bool:
    """Whether cuBLAS leaves most of the device idle, so that parts win.

    In full fp32: 8 x 1024 by 256 5.8 and 8.5, 256 x 1024 by 256 12.1 and 25.4, 2048 x 1664 by 128 29.3 and 43.2,
    1024 x 1024 by 1024 76 and 63, 2048 x 5000 by 512 262 and 301, 256 x 429 by 256 9.1 and 11.4, 512 x 429 by 256 12.4
    and 11.5, 8 x 416 by 256 6.4 and 5.1. In TF32: 2 x 1664 by 256 7.8 and 9.6, 256 x 1664 by 256 8.0 and 9.7, 512 x
    1664 by 256 10.1 and 9.7, 256 x 5000 by 512 15.5 and 20.8, 256 x 8152 by 1024 23.8 and 44.6.
    """
    if dtype is not torch.float32 or not N or N % 4:
        return False
    fitting = (limits for limits in (_IN_TF32 if tf32() else _IN_FULL) if limits[0] <= K)
    _, fewest, most = next(fitting, (0, 1, 0))
    return fewest <= M <= most // N


def is_sliced(M: int, N: int, K: int, aligned: bool) -> bool:
    """Whether blocks of 32 x 32 outputs win, of which each warp takes some of the inputs; in float32.

    In TF32: 20 x 128 by 64 2.4 and 3.9, 256 x 256 by 128 3.1 and 5.1, 256 x 512 by 256 4.2 and 5.3, 512 x 432 by 432
    6.0 and 6.9, 1024 x 512 by 256 7.0 and 5.4, 2048 x 256 by 128 4.7 and 5.2; at any address 256 x 429 by 429 5.6 and
    7.5, 512 x 429 by 429 8.9 and 10.8, 1024 x 645 by 200 12.1 and 14.6, 512 x 429 by 896 16.4 and 13.5. In full fp32:
    20 x 128 by 64 2.9 and 12.1, 256 x 256 by 128 4.2 and 7.6 (in parts 4.8), 1024 x 512 by 256 11.5 and 15.3, 256 x 384
    by 64 5.5 and in parts 4.7; at any address 256 x 429 by 429 7.7 and 9.9, 256 x 100 by 33 3.2 and 15.2, 512 x 429 by
    429 13.3 and 12.4. Up to 16 rows, cuBLAS is faster in full fp32: 8 x 256 by 128 3.9 and 2.8.
    """
    blocks = blocks_of(M, N)
    if min(M, N) < 2 or K <= SHORT_IN or blocks > MOST_BLOCKS:
        return False
    if tf32():
        most_in, most = (640, 100_000) if aligned else (1024, 150_000)
        return most_in >= K and most >= K * blocks
    some = blocks <= (MOST_BLOCKS if aligned or K <= 128 else MOST_BLOCKS // 2)
    return K <= 512 and M > 16 and some and (K <= 256 or blocks > 48 or M < FEWEST_ROWS)


def blocks_of(M: int, N: int) -> int:
    """Of 32 x 32 outputs each."""
    return -(-M // SLICED) * -(-N // SLICED)


def tf32() -> bool:
    """Whether products of float32 may be taken in TF32 (`allow_tf32` raises where the newer setting was used)."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def is_odd(dtype: torch.dtype, M: int, K: int) -> bool:
    """Whether halves whose rows do not start at 16 bytes are padded first: 256 x 415 by 512 6.4 and 13.0."""
    return dtype in HALVES and K % ALIGNED != 0 and K >= _ODD_IN and M >= FEWEST_ROWS
