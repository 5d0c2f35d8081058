"""Steps of an optimizer on the rows of a table that have a gradient."""
