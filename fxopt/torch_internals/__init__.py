"""All that fxopt uses of PyTorch and that PyTorch does not promise: private functions, tensors as C++ lays them out.

One file holds one idea, and imports nothing but torch. Outside of this folder no file touches a private name of torch
(`tests/torch_internals/test_borders.py`). For a new release of torch, run `tests/torch_internals`: a test that fails
says what changed, and what of fxopt depends on it.
"""
