"""What a run says: metrics, where they go, memory, and the page at its end."""
