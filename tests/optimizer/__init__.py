"""One step over spread and repeated parameters."""
