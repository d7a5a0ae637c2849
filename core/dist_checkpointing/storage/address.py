"""Where checkpoints lie, as users write it: paths, `file:///…` and the URLs of object stores, and options behind `?`.

Texts only; the file system is asked about links alone.
"""

import os
import re
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode, urlsplit

SCHEMES = ("gs", "s3", "memory")
OPTIONS = {
    "s3": ("endpoint", "region", "profile", "conditional_write"),
    "gs": ("user_project",),
    "memory": (),
}
# of a file name on Linux, less what stands around a name while it is replaced: prefix and 32 hexadecimal digits
NAME_BYTES = 255 - len(".replaced--") - 32
_STORE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


def parse_address(path_or_url: str | os.PathLike[str]) -> str:
    """An absolute path, or the URL of an object store, its path without a slash at its end.

    Raises ValueError: neither of them, or a URL with options that are not known.
    """
    if not isinstance(path_or_url, (str, bytes, os.PathLike)):
        raise ValueError(
            f"a directory is needed, not {type(path_or_url).__name__}: save(state, directory), load(state, directory)"
        )
    text = os.fspath(path_or_url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(
            f"{path_or_url!r} is no path; give a str or pathlib.Path, or the URL of an object store"
        )
    scheme, separator, rest = text.partition("://")
    if "/" in scheme or not separator:
        return _absolute_path(text)
    if scheme == "file":
        return _absolute_path(_path_of_file_url(text, rest))
    if scheme not in SCHEMES:
        raise ValueError(f"{text}: not a path, file://, gs://, s3:// or memory://")
    # options in canonical form, so that two ways to write one address are equal
    location, mark, query = rest.partition("?")
    address = f"{scheme}://{location.rstrip('/')}"
    if mark:
        address += f"?{_checked_options(f'{scheme}://{location}', scheme, query)}"
    return address


def split_options(address: str) -> tuple[str, dict[str, str]]:
    """(what `parse_address` gave, without its options; the options)."""
    if address.startswith("/"):
        return address, {}
    location, _, query = address.partition("?")
    return location, dict(parse_qsl(query))


def below(address: str, name: str) -> str:
    """The address of what is called `name` there; options stay at the end."""
    location, _ = split_options(address)
    options = address[len(location) :]
    return f"{location.rstrip('/')}/{name}{options}"


def root_and_name(path_or_url: str | os.PathLike[str]) -> tuple[str, str]:
    """(the directory that holds a checkpoint, the checkpoint's name in it). ValueError: it has no name."""
    address = parse_address(path_or_url)
    location, _ = split_options(address)
    options = address[len(location) :]
    # a link to a checkpoint, or to where one shall be
    if os.path.islink(location):
        location = os.path.realpath(location)
        if os.path.islink(location):
            raise ValueError(f"{location} is a link to itself; remove it, or choose another name")
    root, _, name = location.rpartition("/")
    # `runs/.` would name the directory itself, which `parse_address` has already resolved
    if options:
        last_typed = name
    else:
        last_typed = os.fspath(path_or_url).rstrip("/").rpartition("/")[2]
    if not name or root.endswith(":/") or last_typed in (".", ".."):
        raise ValueError(
            f"{os.fspath(path_or_url)!r} names no checkpoint; give a directory that is to be made"
        )
    return (root or "/") + options, name


def check_name(name: str, *, local: bool) -> None:
    """ValueError: a checkpoint cannot be called so in a directory (`local`), or in an object store."""
    # stores take fewer characters than file systems: a key is also a part of URLs and of patterns here
    if local:
        valid = name.isprintable() and not name.startswith(".") and {"/", "\\"}.isdisjoint(name)
        allowed = "what can be printed, without / and \\"
    else:
        valid = _STORE_NAME.fullmatch(name) is not None
        allowed = "letters, digits, _.=+-"
    if not valid or name in ("", "tags"):
        raise ValueError(
            f"{name!r} is no name of a checkpoint: {allowed}, but no dot in front, not `tags`"
        )
    if local and (size := len(os.fsencode(name))) > NAME_BYTES:
        raise ValueError(
            f"{name!r} has {size} bytes; the name of a checkpoint has at most {NAME_BYTES}: shorten it"
        )


def _absolute_path(text: str) -> str:
    first, _, rest = text.partition("/")
    if first.startswith("~"):
        raise ValueError(
            f"{text!r}: ~ is not expanded here; give os.path.expanduser({text!r}), or './{text}' for a directory of "
            "that name"
        )
    if first in (f"{scheme}:" for scheme in ("file", *SCHEMES)):
        raise ValueError(
            f"{text!r} is no URL, it has one slash where two belong, which pathlib.Path makes of them; give the URL "
            f"as str, {first}//{rest}, or './{text}' for a directory of that name"
        )
    # `a/../b` is not `b` where `a` is a link: then links are followed first
    if ".." in text.split("/"):
        absolute = os.path.realpath(text)
    else:
        absolute = os.path.abspath(text)
    return "/" + absolute.lstrip("/")


def _path_of_file_url(url: str, rest: str) -> str:
    """The path of a file: URL. ValueError: it names a host, or what is not a path."""
    host, slash, path = rest.partition("/")
    if not slash or host not in ("", "localhost"):
        raise ValueError(
            f"{url}: {host!r} stands where a host does; a local path has three slashes, file:///{path or host}, and "
            "a relative path is given without file://"
        )
    if "?" in path or "#" in path:
        raise ValueError(f"{url}: ? and # end a URL's path; write %3F and %23, or give a path")
    if match := re.search(r"%(?![0-9A-Fa-f]{2})|%2[Ff]|%00", path):
        bad_escape = path[match.start() : match.start() + 3]
        raise ValueError(
            f"{url}: {bad_escape!r} is no character of a name; write %25 for a percent sign, or give the path "
            "without file://"
        )
    return "/" + os.fsdecode(unquote_to_bytes(path))


def _checked_options(url: str, scheme: str, query: str) -> str:
    """The options of a URL in canonical form.

    Raises ValueError, which shows no value, for it may be a key: an option that is unknown, empty, given twice or of
    a wrong kind.
    """
    known_names = OPTIONS[scheme]
    pairs = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in pairs]
    # a misspelt option would else be ignored, and the data go to another server
    if unknown := [name for name in names if name not in known_names]:
        listed = ", ".join(known_names) or "no options"
        raise ValueError(
            f"{url}: {', '.join(map(repr, unknown))} is no option; {scheme}:// knows {listed}"
        )
    for name, value in pairs:
        if not value or names.count(name) > 1:
            raise ValueError(f"{url}: {name!r} has no value, or two; give it once, with a value")
    options = dict(pairs)
    endpoint = urlsplit(options.get("endpoint", "http://host"))
    if (
        endpoint.scheme not in ("http", "https")
        or not endpoint.hostname
        or endpoint.username
        or endpoint.query
    ):
        raise ValueError(f"{url}: 'endpoint' is no server; write endpoint=https://host:9000")
    if options.get("conditional_write", "true") not in ("true", "false"):
        raise ValueError(f"{url}: 'conditional_write' must be true or false")
    return urlencode(sorted(options.items()), safe=":/")
