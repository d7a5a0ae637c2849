"""From tensors to files, at once or by a program beside the training."""
