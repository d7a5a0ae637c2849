"""What lies on disk: zarr arrays on a grid of chunks, JSON files, digests, keys."""
