"""Code that names something public becomes a link to its reference: `geometry.split`, `find_groups`, `Adam(lr=…)`.

In a docstring names are first sought where the docstring stands, in its class and module. Elsewhere a name without its
module must look like one (`read_step`, `ImageStep`) and be that of one thing alone. A name that begins with one of our
modules and is not found is a warning: it was renamed, or is misspelt.
"""

import re
from collections.abc import Iterator
from typing import Any

from ancestry import ancestors
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry, PythonDomain
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", re.DOTALL)
DISTINCT = re.compile(r"[a-z]+_\w+|[A-Z]\w*[a-z]\w*")
TOP = ("function", "class", "exception", "data")


class Names(SphinxPostTransform):
    """Literals that name public things."""

    default_priority = 800

    def run(self, **kwargs: Any) -> None:
        """Wrap them in references."""
        domain = self.env.domains.python_domain
        for literal in list(self.document.findall(nodes.literal)):
            found = NAME.fullmatch(literal.astext())
            above = list(ancestors(literal))
            if found is None or any(isinstance(node, nodes.reference | addnodes.pending_xref) for node in above):
                continue
            here = next(_places(above), "")
            target = _target(domain, found[1], here)
            if target is not None and target[0] != here:
                self._link(literal, *target)
            elif target is None and found[1].startswith("steradian."):
                logger.warning("nothing public is called %s", found[1], location=literal)

    def _link(self, literal: nodes.literal, name: str, entry: ObjectEntry) -> None:
        inner = literal.deepcopy()
        made = make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, inner, name)
        literal.parent.replace(literal, made)


def _target(domain: PythonDomain, name: str, here: str) -> tuple[str, ObjectEntry] | None:
    """What a name means in a place, with its full name."""
    candidates = [name, f"steradian.{name}"]
    parts = here.split(".")
    candidates += [".".join([*parts[:k], name]) for k in range(len(parts), 1, -1)]
    for candidate in candidates:
        entry = domain.objects.get(candidate)
        # `groups` is rather a variable than the module; `watch` is what users call.
        if entry is not None and (entry.objtype != "module" or "." in name or name == "watch"):
            return candidate, entry
    name = name.removeprefix("steradian.")  # where it is found may not be where it is at home
    if not DISTINCT.match(name):
        return None
    same = [
        (full, entry)
        for full, entry in domain.objects.items()
        if full.endswith(f".{name}") and not entry.aliased and ("." in name or entry.objtype in TOP)
    ]
    if same:
        return same[0] if len(same) == 1 else None
    # A field of a class stands in the description of the class.
    owner, _, field = name.rpartition(".")
    return _target(domain, owner, here) if owner and field.islower() else None


def _places(above: list[nodes.Node]) -> Iterator[str]:
    """Full names of the things whose descriptions a node stands in, the nearest first; then the page's module."""
    for node in above:
        if isinstance(node, addnodes.desc) and node.get("domain") == "py":
            signature = next(node.findall(addnodes.desc_signature))
            yield f"{signature['module']}.{signature['fullname']}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_post_transform(Names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
