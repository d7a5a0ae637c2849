"""Where checkpoints lie, as users write it: paths, `file:///…` and the URLs of object stores, and options behind `?`.
Pure, but for links."""

import os
import re
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode, urlsplit

SCHEMES = ("gs", "s3", "memory")
OPTIONS = {"s3": ("endpoint", "region", "profile", "conditional_write"), "gs": ("user_project",), "memory": ()}
NAME_BYTES = 255 - len(".replaced--") - 32  # of a file name on Linux, less what stands around a name for a while
_STORE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


def parse_address(where: str | os.PathLike[str]) -> str:
    """An absolute path, or the URL of an object store, its path without a slash at its end. ValueError: it is none,
    or has options that are not known."""
    text = os.fspath(where)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{where!r} is no path; give a str or pathlib.Path, or the URL of an object store")
    scheme, separator, rest = text.partition("://")
    if "/" in scheme or not separator:
        return _path(text)
    if scheme == "file":
        return _path(_of_file_url(text, rest))
    if scheme not in SCHEMES:
        raise ValueError(f"{text}: not a path, file://, gs://, s3:// or memory://")
    place, mark, query = rest.partition("?")
    return f"{scheme}://{place.rstrip('/')}" + (f"?{_checked(f'{scheme}://{place}', scheme, query)}" if mark else "")


def place_and_options(address: str) -> tuple[str, dict[str, str]]:
    """What `parse_address` gave, without its options, and those."""
    if address.startswith("/"):
        return address, {}
    place, _, query = address.partition("?")
    return place, dict(parse_qsl(query))


def below(address: str, name: str) -> str:
    """The address of what is called `name` there; options stay at the end."""
    place, _ = place_and_options(address)
    return f"{place.rstrip('/')}/{name}{address[len(place) :]}"


def root_and_name(where: str | os.PathLike[str]) -> tuple[str, str]:
    """Where the checkpoint at a path or URL lies, and what it is called there. ValueError: it has no name."""
    address = parse_address(where)
    text, _ = place_and_options(address)
    options = address[len(text) :]
    if os.path.islink(text):  # a link to a checkpoint, or to where one shall be
        text = os.path.realpath(text)
        if os.path.islink(text):
            raise ValueError(f"{text} is a link to itself; remove it, or choose another name")
    root, _, name = text.rpartition("/")
    last = name if options else os.fspath(where).rstrip("/").rpartition("/")[2]
    if not name or root.endswith(":/") or last in (".", ".."):
        raise ValueError(f"{os.fspath(where)!r} names no checkpoint; give a directory that is to be made")
    return (root or "/") + options, name


def check_name(name: str, *, local: bool) -> None:
    """ValueError: a checkpoint cannot be called so in a directory (`local`), or in an object store."""
    if local:
        bad = not name.isprintable() or name.startswith(".") or not {"/", "\\"}.isdisjoint(name)
        allowed = "what can be printed, without / and \\"
    else:
        bad, allowed = not _STORE_NAME.fullmatch(name), "letters, digits, _.=+-"
    if bad or name in ("", "tags"):
        raise ValueError(f"{name!r} is no name of a checkpoint: {allowed}, but no dot in front, not `tags`")
    if local and (size := len(os.fsencode(name))) > NAME_BYTES:
        raise ValueError(f"{name!r} has {size} bytes; the name of a checkpoint has at most {NAME_BYTES}: shorten it")


def _path(text: str) -> str:
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
    absolute = os.path.abspath(text) if ".." not in text.split("/") else os.path.realpath(text)  # links before ..
    return "/" + absolute.lstrip("/")


def _of_file_url(url: str, rest: str) -> str:
    """The path of a file: URL. ValueError: it names a host, or what is not a path."""
    host, slash, path = rest.partition("/")
    if not slash or host not in ("", "localhost"):
        raise ValueError(
            f"{url}: {host!r} stands where a host does; a local path has three slashes, file:///{path or host}, and "
            "a relative path is given without file://"
        )
    if "?" in path or "#" in path:
        raise ValueError(f"{url}: ? and # end a URL's path; write %3F and %23, or give a path")
    if bad := re.search(r"%(?![0-9A-Fa-f]{2})|%2[Ff]|%00", path):
        raise ValueError(
            f"{url}: {path[bad.start() : bad.start() + 3]!r} is no character of a name; write %25 for a percent "
            "sign, or give the path without file://"
        )
    return "/" + os.fsdecode(unquote_to_bytes(path))


def _checked(url: str, scheme: str, query: str) -> str:
    """The options of a URL as they are written here. ValueError, which shows no value, for it may be a key: one is
    unknown, empty, twice or not what it should be."""
    known, told = OPTIONS[scheme], parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in told]
    if bad := [name for name in names if name not in known]:
        listed = ", ".join(known) or "no options"
        raise ValueError(f"{url}: {', '.join(map(repr, bad))} is no option; {scheme}:// knows {listed}")
    if bad := [name for name, value in told if not value or names.count(name) > 1]:
        raise ValueError(f"{url}: {bad[0]!r} has no value, or two; give it once, with a value")
    options = dict(told)
    endpoint = urlsplit(options.get("endpoint", "http://host"))
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.username or endpoint.query:
        raise ValueError(f"{url}: 'endpoint' is no server; write endpoint=https://host:9000")
    if options.get("conditional_write", "true") not in ("true", "false"):
        raise ValueError(f"{url}: 'conditional_write' must be true or false")
    return urlencode(sorted(options.items()), safe=":/")
