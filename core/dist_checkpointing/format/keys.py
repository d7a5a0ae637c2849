"""Keys and the paths of arrays: what a directory or an object store may not hold in a name is escaped as in URLs."""

from urllib.parse import quote, unquote

RESERVED = ("receipts", "manifest.json", "zarr.json")
MAX_NAME_LENGTH = 200  # characters, escaped: file systems take 255


def path_of(key: str) -> str:
    """`model/étape 1` -> `model/%C3%A9tape%201`: ASCII letters, digits, `_`, `-`, `.` and `/` stay as they are."""
    check_key(key)
    return "/".join(map(_escaped, key.split("/")))


def key_of(path: str) -> str:
    """The inverse of `path_of`."""
    return unquote(path, errors="surrogatepass")


def check_key(key: str) -> None:
    """Raise ValueError where a key cannot be a path below a checkpoint, escaped or not."""
    for name in key.split("/"):
        if not name.strip(".") or name in RESERVED or len(_escaped(name)) > MAX_NAME_LENGTH:
            raise ValueError(
                f"the key {key!r} cannot be a path in a checkpoint: its names, between '/', must not be empty, of "
                f"dots only, of more than {MAX_NAME_LENGTH} characters (escaped), or one of {', '.join(RESERVED)}; "
                "rename it"
            )


def _escaped(name: str) -> str:
    text = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    # zarr keeps names that begin with `__` for itself
    if text.startswith("__"):
        return f"%5F{text[1:]}"
    return text
