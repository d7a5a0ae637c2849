"""Updates that look at a parameter as a whole, however it is cut: their sums over ranks, LAMB, Adafactor."""
