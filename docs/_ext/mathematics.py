r"""Formulas as MathML, made when the site is built, with the font that draws them inside the stylesheet.

Nothing is loaded from elsewhere and no script runs in the reader's browser. docutils translates the LaTeX and raises an
error for what it does not know, which becomes a warning and so fails the build.

Delimiters grow with `\bigl` and similar commands; round and square ones also with `\left`, bars and angles do not.
"""

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

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
    "STIX Two Math, a subset whose delimiters have equal widths. "
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

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
TALLEST = 2400
"""Height of the largest delimiter, in thousandths of the font's size: browsers reserve the width of the widest one."""

SIGNS = (".", ",", ";", ":", ")", "?")
FENCES = set("‖|⟨⟩{}")
ACCENTS = set("~ˆˉ¯ˇ˙¨")
APPLY = "\u2061"  # invisible operator between a function and its argument


def mathml(tex: str, *, block: bool) -> str:
    """The formula as a `math` element.

    Raises:
        MathError: docutils does not know something in it.
    """
    # The font draws a prime raised; as a superscript it would be raised twice.
    text = tex2mathml(tex.replace("'", r"\prime "), as_block=block).replace("&ApplyFunction;", APPLY)
    root = ElementTree.fromstring(text.replace(f' xmlns="{NAMESPACE}"', ""))
    for element in root.iter():
        for place, child in enumerate(element):
            if child.tag == "mo":
                _space(child, element[place + 1] if place + 1 < len(element) else None)
            elif child.tag == "mi" and child.text == "∇":
                child.set("mathvariant", "normal")
            elif child.tag in ("munderover", "msup"):
                element[place] = _accented(child)
    return ElementTree.tostring(root, encoding="unicode")


def _space(sign: Element, after: Element | None) -> None:
    if sign.text in FENCES and not sign.attrib:
        # Without a size of its own it keeps that of the line; a browser would stretch it over its neighbours.
        sign.set("stretchy", "false")
    elif sign.text == "/":
        sign.attrib.update(lspace="0.06em", rspace="0.06em")
    elif sign.text == APPLY and (after is None or after.text != "("):  # arctan z, but arctan(z)
        sign.tag, sign.text = "mspace", None
        sign.set("width", "0.1667em")


def _accented(scripts: Element) -> Element:
    """The letter with its accent, and the scripts behind it; docutils sets a subscript under such a letter."""
    under = scripts[0] if scripts.tag == "msup" else scripts
    if under.tag != "munderover" or under[2].text not in ACCENTS:
        return scripts
    letter = Element("mover", accent="true")
    letter.extend([under[0], under[2]])
    made = Element("msub" if under is scripts else "msubsup")
    made.extend([letter, under[1], *([] if under is scripts else [scripts[1]])])
    made.tail = scripts.tail
    return made


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
    package = importlib.util.find_spec("ziamath")  # found, not imported: its font is all that is wanted
    assert package is not None, "the extra 'docs' has the package ziamath"
    made = io.BytesIO()
    with subset.load_font(str(Path(package.origin or "").parent / "fonts" / FONT), options) as whole:
        _even_out(whole)
        cut = subset.Subsetter(options)
        cut.populate(unicodes=[code for first, last in RANGES for code in range(first, last + 1)])
        cut.subset(whole)
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
