"""What `mkdocs build` needs beyond the pages in docs/.

README and CHANGELOG become pages, each package that exports names has an API page. In the repository a link such as
../core/pipeline/run/stage.py opens the file; on the site it opens a page that shows it.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTER_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^)\s]+)\)")
# names of cases such as param_groups[0]['lr'], which are no references
TABLE_SUBSCRIPT = re.compile(r"(?<=[\]\w ])\[(?='\w+'\][^`|]*\|)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def on_config(config):
    """The API and the decisions are listed in the navigation as they are found."""
    config.nav.append({"API": [f"api/{package}.md" for package, _ in exported_packages()]})
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{name}" for name in decisions]})
    return config


def on_files(files, config):
    """Adds the generated pages; they are links' targets, so they must exist before any page is rendered."""
    from mkdocs.structure.files import File

    def add(uri: str, content: str) -> None:
        files.append(File.generated(config, uri, content=content))

    for outer, uri in OUTER_PAGES.items():
        add(uri, rewritten(ROOT / outer, uri))
    for package, names in exported_packages():
        add(
            f"api/{package}.md",
            f"# {package}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n",
        )
    for target in sorted(linked_outside()):
        if target not in OUTER_PAGES:
            add(f"source/{target}.md", source_page(ROOT / target))
    return files


def on_page_markdown(markdown, page, **_):
    """Links out of docs/ lead to the generated pages."""
    if (
        page.file.src_uri.startswith(("source/", "api/"))
        or page.file.src_uri in OUTER_PAGES.values()
    ):
        return markdown
    if page.file.src_uri == "compatibility.md":
        markdown = TABLE_SUBSCRIPT.sub(r"\\[", markdown)
    return rewritten(ROOT / "docs" / page.file.src_uri, page.file.src_uri, markdown)


def exported_packages() -> Iterator[tuple[str, list[str]]]:
    """(package, full names of what it exports) of each package of `core` that exports something."""
    for init in sorted((ROOT / "core").rglob("__init__.py")):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        names = sorted(exports(init))
        if names and not package.startswith(
            "core.interop.megatron"
        ):  # Megatron's own names, documented there
            yield package, names


def exports(init: Path) -> Iterator[str]:
    """Full names of what an `__init__` takes from its own modules: at import, or at first use (TYPE_CHECKING)."""
    package = ".".join(init.parent.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(init.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            for alias in node.names:
                is_private = alias.name.startswith("_")
                is_module = (
                    (ROOT / f"{node.module}.{alias.name}".replace(".", "/"))
                    .with_suffix(".py")
                    .exists()
                )
                if not is_private and not is_module:
                    yield f"{node.module}.{alias.name}"


def linked_outside() -> set[str]:
    """Paths, from the root, of files and folders outside docs/ to which a page links."""
    pages = [ROOT / outer for outer in OUTER_PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    targets = {target for page in pages for _, target in resolved_links(page, page.read_text())}
    return {target for target in targets if not target.startswith("docs/")}


def resolved_links(page: Path, markdown: str) -> Iterator[tuple[str, str]]:
    """(link, path from the root) of each link to something of this repository."""
    for match in LINK.finditer(FENCE.sub("", markdown)):
        link = match[2].partition("#")[0]
        target = (page.parent / link).resolve()
        if link and "://" not in link and target.exists() and target.is_relative_to(ROOT):
            yield match[2], str(target.relative_to(ROOT))


def rewritten(page: Path, uri: str, markdown: str | None = None) -> str:
    """The page with each link to this repository as it is on the site, where the page is `uri`."""
    markdown = page.read_text() if markdown is None else markdown
    for link, target in set(resolved_links(page, markdown)):
        _, hash_mark, anchor = link.partition("#")
        inside = target.removeprefix("docs/") if target.startswith("docs/") else None
        if inside is not None and Path(target).is_dir():
            inside = f"{inside}/{min(path.name for path in (ROOT / target).glob('*.md'))}"
        on_site = inside or OUTER_PAGES.get(target) or f"source/{target}.md"
        relative = os.path.relpath(on_site, os.path.dirname(uri) or ".")
        markdown = markdown.replace(f"]({link})", f"]({relative}{hash_mark}{anchor})")
    return markdown


def source_page(path: Path) -> str:
    """A page that shows a file, or lists a folder."""
    title = path.relative_to(ROOT)
    if path.is_dir():
        entries = sorted(
            entry.name for entry in path.iterdir() if entry.suffix in {".py", ".md", ".toml"}
        )
        return f"# {title}\n\n" + "\n".join(f"- `{entry}`" for entry in entries) + "\n"
    language = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml"}.get(
        path.suffix, "text"
    )
    return f"# {title}\n\n````{language}\n{path.read_text()}\n````\n"
