"""Values that come late into a tensor whose other columns are written beside them."""
