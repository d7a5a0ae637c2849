"""`initialize`: training in a loop of one's own, with an engine whose methods bear the names DeepSpeed users know."""
