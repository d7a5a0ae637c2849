"""How a checkpoint comes to exist, at once or not at all; and which are kept."""
