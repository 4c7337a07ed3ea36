"""The whole program, when its trace is finished: differentiation, and how it meets PyTorch's autograd."""
