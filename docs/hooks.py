"""The site's pages beyond docs/: what the pages link to elsewhere in the repository, and the reference of functions.

A page of docs/ reads the same on GitHub: its links to README, scripts, folders and result files are relative paths. On
the site each of these has a place of its own, under repo/: Markdown is a page, source a highlighted page, a folder a
list of its files, all else is copied. Links to what is not there are warnings, which end a strict build.
"""

import json
import logging
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?P<code>`+)[^`].*?(?P=code)|\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
REFERENCE = re.compile(r"^- \[`(\w+)`\]\(\.\./([\w/]+)\.py\).*$", re.MULTILINE)
SOURCE = {".py": "python", ".cpp": "cpp", ".toml": "toml", ".txt": "text", ".yml": "yaml", "": "text"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"  # pages of source are not what a search is for
LOG = logging.getLogger("mkdocs.plugins.hooks")

places: dict[str, Path] = {}
"""page of the site -> the file or folder that it is made from"""


def on_files(files, config):
    """Add README.md, and what any page links to."""
    places.clear()
    places.update({file.src_uri: DOCS / file.src_uri for file in files.documentation_pages()})
    todo = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *places.values()]
    seen = set(todo)
    while todo:
        path = todo.pop()
        if files.get_file_from_path(name := place_of(path)) is None:
            files.append(made(config, name, path))
        for target in targets_of(path):
            if target not in seen and target.exists() and ROOT in target.parents:
                seen.add(target)
                todo.append(target)
    return files


def on_page_markdown(markdown, page, config, files):
    """Have links lead to where their targets are on the site."""
    source = places.get(page.file.src_uri)
    if source is None or not (source.is_dir() or source.suffix in (".md", ".ipynb")):
        return markdown
    if page.file.src_uri == "api.md":
        markdown = REFERENCE.sub(lambda found: f"::: {module_of(found[2])}.{found[1]}", markdown)
    here = os.path.dirname(page.file.src_uri)

    def moved(found):
        if not is_relative(found):
            return found[0]
        target = resolved(source, found["target"])
        if not target.exists() or ROOT not in target.parents:
            LOG.warning(f"{page.file.src_uri}: there is no {found['target']}")
            return found[0]
        return f"]({os.path.relpath(place_of(target), here or '.')}{found['anchor'] or ''})"

    return outside_of_code(markdown, lambda text: LINK.sub(moved, text))


def module_of(name):
    """`wrappers/vector` -> a3c_mp.wrappers.vector; `a3c_mp/errors` -> a3c_mp.errors."""
    name = name.replace("/", ".")
    return f"a3c_mp.{name}" if name.startswith("wrappers.") else name


def place_of(path):
    """Where a file or folder of the repository is among the sources of the site."""
    if path == ROOT / "README.md":
        return "index.md"
    name = path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()
    name = name if DOCS in path.parents else f"repo/{name}"
    if path.is_dir():
        return place_of(path / "README.md") if (path / "README.md").exists() else f"{name}/index.md"
    return f"{name}.md" if path.suffix in SOURCE or path.suffix == ".ipynb" else name


def made(config, name, path):
    """A file of the site, and for a page the note from what it is made."""
    if not name.endswith(".md"):
        return File.generated(config, name, abs_src_path=str(path))
    places[name] = path
    if path.suffix == ".md":
        return File.generated(config, name, abs_src_path=str(path))
    if path.is_dir():
        lines = [f"- [{title_of(child)}]({child.name})\n" for child in children(path)]
        text = f"# {path.relative_to(ROOT)}\n\n{''.join(lines)}"
    elif path.suffix == ".ipynb":
        text = notebook(path)
    else:
        title = path.relative_to(ROOT).as_posix()
        text = f"{HIDDEN}# {title}\n\n````{SOURCE[path.suffix]}\n{path.read_text()}````\n"
    return File.generated(config, name, content=text)


def notebook(path):
    """The cells of a notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts)


def children(folder):
    """What the page of a folder lists."""
    found = (path for path in folder.iterdir() if path.suffix in (*SOURCE, ".md") and path.name[0] not in "._")
    return sorted(path for path in found if path.is_file())


def title_of(path):
    """The heading of a Markdown file, the name of another."""
    return path.read_text().partition("\n")[0].lstrip("# ") if path.suffix == ".md" else path.name


def targets_of(path):
    """What a page links to, of this repository."""
    if path.is_dir():
        return [] if (path / "README.md").exists() else children(path)
    if path.suffix != ".md":
        return []
    found = []
    outside_of_code(path.read_text(), lambda text: found.extend(LINK.finditer(text)) or text)
    return [resolved(path, link["target"]) for link in found if is_relative(link)]


def is_relative(link):
    return bool(link["target"]) and not re.match(r"[a-z]+:", link["target"])


def resolved(source, target):
    """The file or folder that a link of a page names; that page is the list of a folder, or a file."""
    return Path(os.path.normpath((source if source.is_dir() else source.parent) / target))


def outside_of_code(markdown, change):
    """Markdown with its lines changed, other than those of fenced code."""
    lines, fence = [], ""
    for line in markdown.split("\n"):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        lines.append(line if fence or mark else change(line))
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
    return "\n".join(lines)
