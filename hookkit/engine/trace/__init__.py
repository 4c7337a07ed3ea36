"""What is known of a trace, and what is made of one: which tensors require grad, share memory, and lead to which."""
