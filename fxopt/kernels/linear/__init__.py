"""Linear layers through whichever of torch's GEMM libraries is faster here."""
