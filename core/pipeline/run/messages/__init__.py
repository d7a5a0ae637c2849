"""What travels between the pipeline ranks: activations and gradients, and the news that one of them failed."""
