"""From text files, or the standard library's sources, to a token file."""
