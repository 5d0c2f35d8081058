"""Linear layers on a GPU, without gradients: one by one, whole chains in a launch, and what a cross network adds."""
