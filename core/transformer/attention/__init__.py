"""Self attention: the fused projection, the kernel, and the cache of keys and values for generation."""
