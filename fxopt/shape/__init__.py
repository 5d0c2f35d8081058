"""Facts about a graph: symbolic sizes, strided views, aliasing."""
