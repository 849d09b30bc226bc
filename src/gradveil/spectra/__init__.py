"""Linear algebra of what a release tells about an input: Jacobians, Gram matrices, singular values."""
