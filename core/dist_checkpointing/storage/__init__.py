"""Where it lies: directories and object stores, addresses, tensorstore."""
