"""What thunder's interpreter does in the place of a call: which rule takes it, and how."""
