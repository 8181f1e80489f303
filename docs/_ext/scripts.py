"""Formulas in running text, such as r_k/r_i, c^⊥ and β^{k−i}, get their sub- and superscripts."""

import re
from collections.abc import Iterator
from typing import Any

from ancestry import ancestors
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

SCRIPT = re.compile(
    r"_(?:\{(?P<sub>[^{}]+)\}|(?P<index>[A-Za-z0-9])(?![A-Za-z0-9_]))"
    r"|\^(?:\{(?P<super>[^{}]+)\}|\((?P<sum>[^()]+)\)|(?P<power>grad|L2|⊥|−?[A-Za-z0-9](?![A-Za-z0-9])))"
)
# A script follows a single letter or a closed expression, so that names_with_underscores stay as they are.
BASE = "(?:(?<![A-Za-z0-9_])(?:Exp|[A-Za-zΑ-Ωα-ω][\u0300-\u036f]?[0-9]?)|[)\\]‖⟩])"
NAMELESS = re.sub(r"\?P<\w+>", "?:", SCRIPT.pattern)
FORMULA = re.compile(f"(?P<base>{BASE})(?P<scripts>(?:{NAMELESS})+)")
VERBATIM = (nodes.literal, nodes.FixedTextElement, nodes.math, nodes.math_block, nodes.raw)


def written(text: str) -> Iterator[nodes.Node]:
    """The text with its scripts as nodes; nothing where there are none."""
    end = 0
    for found in FORMULA.finditer(text):
        yield nodes.Text(text[end : found.end("base")])
        for script in SCRIPT.finditer(found["scripts"]):
            below = script["sub"] or script["index"]
            what = below or script["super"] or script["sum"] or script["power"]
            what = what.replace("-", "−")
            yield nodes.subscript("", what) if below else nodes.superscript("", what)
        end = found.end()
    if end:
        yield nodes.Text(text[end:])


class Scripts(SphinxPostTransform):
    """All text that is not code, a formula of its own, or a signature."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        """Replace the text nodes that hold scripts."""
        for text in list(self.document.findall(nodes.Text)):
            parent = text.parent
            if parent is None or isinstance(parent, VERBATIM) or "sig" in " ".join(parent.get("classes", [])):
                continue
            if any(isinstance(above, VERBATIM) for above in ancestors(parent)):
                continue
            made = list(written(str(text)))
            if made:
                parent.replace(text, made)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_post_transform(Scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
