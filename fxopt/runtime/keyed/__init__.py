"""Calls whose KeyedJaggedTensors have another form than those of a capture."""
