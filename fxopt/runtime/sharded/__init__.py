"""Models that hold modules which communicate with other processes."""
