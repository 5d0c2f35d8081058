"""Attention over short sequences, of operands that lie in any regular way in memory."""
