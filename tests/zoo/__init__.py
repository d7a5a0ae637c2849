"""A zoo of other people's programs: each states its outcome (right, told, refused) and is held to it."""
