"""One step over one or many stages."""
