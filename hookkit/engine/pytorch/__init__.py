"""Callees that PyTorch runs, under its own autograd."""
