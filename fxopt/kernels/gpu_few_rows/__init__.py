"""Linear layers one behind the other on a GPU for a few rows: one launch that never stops reading weights."""
