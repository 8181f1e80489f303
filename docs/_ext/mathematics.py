r"""Formulas as MathML, made when the site is built, with the font that draws them inside the stylesheet.

Nothing is loaded from elsewhere and no script runs in the reader's browser. docutils translates the LaTeX and raises on
what it does not know, which is a warning here and so an error of the build.

Delimiters grow by `\bigl` and its kin, or by `\left` for round and square ones; bars and angles after `\left` do not.
"""

import base64
import io
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from fontTools import subset
from fontTools.pens.transformPen import TransformPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

FONT = "STIXTwoMath-Regular.ttf"
NOTICE = (
    "STIX Two Math, a subset whose delimiters were evened out. "
    "Copyright 2001-2020 The STIX Fonts Project Authors. SIL Open Font License 1.1."
)
RANGES = (
    (0x20, 0x7E),
    (0xA0, 0xFF),
    (0x2C6, 0x2DD),  # accents
    (0x300, 0x338),
    (0x391, 0x3F6),  # Greek
    (0x2010, 0x2057),
    (0x2100, 0x214F),
    (0x2190, 0x22FF),  # arrows and operators
    (0x23B0, 0x23E1),  # braces over and under
    (0x27C0, 0x27EF),
    (0x1D400, 0x1D7FF),  # letters in italics, bold, script
)

TALLEST = 2400
"""Height of the largest delimiter, in thousandths of the font's size: browsers reserve the width of the widest one."""

SIGNS = (".", ",", ";", ":", ")", "?")
FENCES = re.compile(r"<mo>([‖|⟨⟩])</mo>")
APPLIED = re.compile(r"<mo>&ApplyFunction;</mo>(\s*)(?!\s|<mo stretchy=\"false\">\()")


def mathml(tex: str, *, block: bool) -> str:
    """The formula as a `math` element.

    Raises:
        MathError: docutils does not know something in it.
    """
    found = tex2mathml(tex.replace("'", r"\prime "), as_block=block)
    # A prime is drawn raised; as a superscript it would be raised twice.
    found = found.replace("<mo>′</mo>", '<mo lspace="0" rspace="0">′</mo>')
    # Bars and angles without a size keep that of their line; a browser would stretch them over their neighbours.
    found = FENCES.sub(r'<mo stretchy="false">\1</mo>', found)
    found = found.replace("<mi>∇</mi>", '<mi mathvariant="normal">∇</mi>')
    found = found.replace('<mo stretchy="false">/</mo>', '<mo lspace="0.06em" rspace="0.06em" stretchy="false">/</mo>')
    # arctan z, but arctan(z)
    found = APPLIED.sub(r'<mspace width="0.1667em"></mspace>\1', found)
    return found.replace("<mo>&ApplyFunction;</mo>", "")


def _visit(self: HTML5Translator, node: nodes.math | nodes.math_block, *, block: bool) -> None:
    try:
        found = mathml(node.astext(), block=block)
    except MathError as error:
        logger.warning("no MathML for %r: %s", node.astext(), error, location=node)
        found = f"<code>{self.encode(node.astext())}</code>"
    if block:
        number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
        identity = f' id="{node["ids"][0]}"' if node["ids"] else ""
        found = f'<div class="math"{identity}>{found}{number}</div>'
    elif "sign" in node:
        found = f'<span class="math">{found}{node["sign"]}</span>'
    self.body.append(found)
    raise nodes.SkipNode


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    _visit(self, node, block=False)


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    _visit(self, node, block=True)


class Punctuation(SphinxPostTransform):
    """A sign of punctuation after a formula belongs to it: a line must not begin with one."""

    default_priority = 850

    def run(self, **kwargs: Any) -> None:
        """Take the signs from the texts that follow formulas."""
        for node in self.document.findall(nodes.math):
            place = node.parent.index(node) + 1
            after = node.parent[place] if place < len(node.parent) else None
            if isinstance(after, nodes.Text) and after.startswith(SIGNS):
                node["sign"] = str(after[0])
                node.parent[place] = nodes.Text(after[1:])


def font() -> bytes:
    """The letters and signs that formulas are made of, out of the font that the package ziamath brings, as WOFF."""
    options = subset.Options(flavor="woff", layout_features=["*"], hinting=False, notdef_outline=True)
    whole = subset.load_font(str(files("ziamath") / "fonts" / FONT), options)
    _even_out(whole)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=[code for first, last in RANGES for code in range(first, last + 1)])
    cut.subset(whole)
    made = io.BytesIO()
    subset.save_font(whole, made, options)
    return made.getvalue()


def _even_out(whole: TTFont) -> None:
    """Make the sizes of a delimiter alike in width: room for the widest is a gap beside the others."""
    variants = whole["MATH"].table.MathVariants
    radical = whole.getBestCmap()[ord("√")]
    for name, sizes in zip(variants.VertGlyphCoverage.glyphs, variants.VertGlyphConstruction, strict=True):
        kept = [size for size in sizes.MathGlyphVariantRecord if size.AdvanceMeasurement <= TALLEST]
        sizes.MathGlyphVariantRecord, sizes.VariantCount, sizes.GlyphAssembly = kept, len(kept), None
        if name == radical:
            for size in kept:
                _narrow(whole, size.VariantGlyph, whole["hmtx"][radical][0])


def _narrow(whole: TTFont, name: str, width: int) -> None:
    advance, bearing = whole["hmtx"][name]
    share = width / advance
    pen = TTGlyphPen(None)
    whole.getGlyphSet()[name].draw(TransformPen(pen, (share, 0, 0, 1, 0, 0)))
    whole["glyf"][name] = pen.glyph()
    whole["glyf"][name].recalcBounds(whole["glyf"])
    whole["hmtx"][name] = width, round(share * bearing)


def write_font(app: Sphinx, error: Exception | None) -> None:
    """The stylesheet with the font in it: browsers do not load a font file into a page that is opened from disk."""
    out = Path(app.outdir) / "_static" / "mathematics.css"
    if error is None and app.builder.format == "html" and not out.exists():
        data = base64.b64encode(font()).decode("ascii")
        face = f'font-family: "Steradian Math"; src: url("data:font/woff;base64,{data}") format("woff");'
        out.write_text(f"/* {NOTICE} */\n@font-face {{ {face} }}\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Make this the way in which formulas are written."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    app.add_post_transform(Punctuation)
    app.add_css_file("mathematics.css")
    app.connect("build-finished", write_font)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
