"""Side by side with a peer in one run: `python -m benchmarks.<name> [--quick] [--json FILE]`."""
