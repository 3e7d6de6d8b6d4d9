"""How an extra of fedkeep is installed: from where fedkeep itself came, which may be a folder."""

from __future__ import annotations

import functools
import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname


@functools.cache
def installing(extra: str) -> str:
    """Return the command that installs an extra beside this fedkeep, for a shell."""
    try:
        origin = json.loads(distribution("fedkeep").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # it is on the path alone
        origin = {}
    if "dir_info" not in origin:
        return f"pip install 'fedkeep[{extra}]'"
    folder = url2pathname(urlsplit(origin["url"]).path)
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
