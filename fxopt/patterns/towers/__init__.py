"""Parallel linears, experts and towers: which columns every tensor holds, and the regions that one call computes."""
