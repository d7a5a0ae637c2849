"""What an update needs to know first: the gradient norm, overflows, the loss scale, parameters without a gradient."""
