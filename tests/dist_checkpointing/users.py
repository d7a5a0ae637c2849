"""A user's files, beside ours."""


def made(top, *files):
    """A user's files."""
    for name in files:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("mine")
    return top


def files_below(top):
    return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}
