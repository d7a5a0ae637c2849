"""What a user may get wrong around a pipeline: its arguments, and a training loop written for one process."""
