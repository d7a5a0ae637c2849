"""Main weights and moments in flat buffers, on the device or offloaded, and the kernels that update them."""
