"""What is said about settings that are misspelt, come from elsewhere, are no TOML, or have no effect."""
