"""Direct preference optimization (DPO) in a run: its settings, its loss, and the reference that it is relative to."""
