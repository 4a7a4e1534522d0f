"""A hook of MkDocs: pages for files outside of ``docs/``, so that links work on the site as they do in the repository.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages. A file that a page links to (an example, a module) is shown under
``source/``; a folder is shown as the list of its files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Of files that are shown, by their suffix.
LANGUAGES = {".ipynb": "json", ".json": "json", ".py": "python", ".sh": "bash", ".yaml": "yaml"}
RELATIVE_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of ``docs/`` that has one, or that another page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for link in RELATIVE_LINK.findall(page.content_string):
            target = repository_path(page.src_uri, link)
            within = sorted(path for path in target.rglob("*") if path.suffix in LANGUAGES)
            for path in [target, *within] if target.exists() else []:
                uri = site_uri(path)
                if uri.startswith("source/") and uri not in files.src_uris:
                    files.append(File.generated(config, uri, content=source_page(path, within)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to pages of the site."""
    here = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        return os.path.relpath(site_uri(repository_path(here, link[0])), Path(here).parent)

    return markdown if here.startswith("source/") else RELATIVE_LINK.sub(on_site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drop Sphinx's roles, which stand before names in docstrings."""
    return re.sub(r":\w+:<code>~?", "<code>", html)


def repository_path(uri: str, link: str) -> Path:
    """Return the file or folder that ``link`` names in the file behind the page ``uri``."""
    sources = {page: ROOT / path for path, page in PAGES.items()}
    return Path(os.path.normpath(sources.get(uri, ROOT / "docs" / uri).parent / link))


def site_uri(path: Path) -> str:
    """Return the place on the site of a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else f"source/{name}.md")


def source_page(path: Path, within: list[Path]) -> str:
    """Return the Markdown that shows a file, or lists the files of a folder. Searches leave it out."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return head + "\n".join(
            f"- [{file.relative_to(path)}]({path.name}/{file.relative_to(path)}.md)" for file in within
        )
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        return head + "\n\n".join(text if kind == "markdown" else f"````python\n{text}\n````" for kind, text in texts)
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}````\n"
