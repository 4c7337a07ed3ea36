"""A call as one operator that PyTorch runs."""
