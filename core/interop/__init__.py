"""Other frameworks' names and files over ours; nothing here is imported by the rest of `core`."""
