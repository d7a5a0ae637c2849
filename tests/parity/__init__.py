"""Numbers are the same on every layout."""
