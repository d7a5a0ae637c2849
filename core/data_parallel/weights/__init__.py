"""ZeRO-3: weights that are there while a unit computes, and what stands for them meanwhile."""
