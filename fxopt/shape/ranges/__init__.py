"""Value ranges: what every element of a tensor can be, and which conditions that decides."""
