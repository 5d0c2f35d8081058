"""fxopt::lookup_products: products and dot products of pairs of looked-up rows, which are never written out."""
