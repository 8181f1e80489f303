"""Code that names something public becomes a link to its reference: `geometry.split`, `st.watch`, `Adam(lr=…)`.

In a docstring a name is first looked up in its own class and module. Elsewhere a name without its module must look like
one (`read_step`, `ImageStep`) and be unique. A name that begins with `steradian.` and is not found is a warning: it was
renamed or is misspelled.
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
FUNCTIONS = {
    "watch": "steradian.watching.watch.watch",
    "st.watch": "steradian.watching.watch.watch",
    "st.report": "steradian.reporting.page.report",
    "st.find_groups": "steradian.discovery.find_groups",
}
"""Functions that users call by another name than the one under which the reference lists them."""


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
    """The full name and the entry that a name refers to at a place."""
    name = FUNCTIONS.get(name, name)
    candidates = [name, f"steradian.{name}"]
    parts = here.split(".")
    candidates += [".".join([*parts[:k], name]) for k in range(len(parts), 1, -1)]
    for candidate in candidates:
        entry = domain.objects.get(candidate)
        # `groups` is more often a variable than the module.
        if entry is not None and (entry.objtype != "module" or "." in name):
            return candidate, entry
    name = name.removeprefix("steradian.")  # the reference may list it under the module that defines it
    if not DISTINCT.match(name):
        return None
    same = [
        (full, entry)
        for full, entry in domain.objects.items()
        if full.endswith(f".{name}") and not entry.aliased and ("." in name or entry.objtype in TOP)
    ]
    if same:
        return same[0] if len(same) == 1 else None
    # A field of a class is described with the class.
    owner, _, field = name.rpartition(".")
    return _target(domain, owner, here) if owner and field.islower() else None


def _places(above: list[nodes.Node]) -> Iterator[str]:
    """Full names of the objects whose descriptions contain a node, the nearest first."""
    for node in above:
        if isinstance(node, addnodes.desc) and node.get("domain") == "py":
            signature = next(node.findall(addnodes.desc_signature))
            yield f"{signature['module']}.{signature['fullname']}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_post_transform(Names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
