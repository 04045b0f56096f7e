"""Turns links that leave docs/ into the paths that they lead to: the site has no such pages.

A hook of mkdocs, which calls `on_page_markdown` for every page.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"])
    root, folder = docs.parent, Path(page.file.abs_src_path).parent

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = Path(os.path.normpath(folder / target))
        if "://" in target or path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        name = f"`{path.relative_to(root)}`"
        return name if Path(text).name == path.name else f"{text} ({name})"

    return LINK.sub(replaced, markdown)
