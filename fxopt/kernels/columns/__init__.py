"""fxopt::columns: all embedding columns of a model as one table-driven operator."""
