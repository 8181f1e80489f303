"""What the site's own extensions do to formulas, scripts and docstrings."""

import io
import sys

import pytest

from pages import ROOT

pytest.importorskip("sphinx")
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import docstrings
import mathematics
import scripts
from docutils import nodes
from docutils.utils.math import MathError
from fontTools.ttLib import TTFont


def plain(text):
    """The text with _{…} and ^{…} where there are nodes."""
    marks = {nodes.Text: "{}", nodes.subscript: "_{{{}}}", nodes.superscript: "^{{{}}}"}
    return "".join(marks[type(node)].format(node.astext()) for node in scripts.written(text))


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("c_k^grad = r_k/r_i", "c_{k}^{grad} = r_{k}/r_{i}"),
        ("‖c^⊥‖ and η^e", "‖c^{⊥}‖ and η^{e}"),
        ("d^{-1/2}‖b‖", "d^{−1/2}‖b‖"),
        ("(1−ηλ)^{−2k−1}", "(1−ηλ)^{−2k−1}"),
        ("weights are β^(k−i)", "weights are β^{k−i}"),
        ("Exp_u(w), β1^{k+1}", "Exp_{u}(w), β1^{k+1}"),
    ],
)
def test_scripts_of_formulas_in_text(text, made):
    assert plain(text) == made


@pytest.mark.parametrize("text", ["x_next and exp_avg_sq", "part_0 of __init__", "no script here", "a ^ b"])
def test_names_are_left_alone(text):
    assert plain(text) == ""


def test_what_docutils_lacks():
    assert "′" in mathematics.mathml("x'^2", block=False)
    assert 'stretchy="false">‖' in mathematics.mathml(r"\|x\|", block=False)
    assert "mspace" in mathematics.mathml(r"\arctan z", block=False)
    assert "mspace" not in mathematics.mathml(r"\arctan(z)", block=False)
    for tex, tag in ((r"\tilde u_k", "msub"), (r"\tilde r_k^2", "msubsup")):
        made = mathematics.mathml(tex, block=False)
        assert f"<{tag}><mover" in "".join(line.strip() for line in made.splitlines())
        assert "munderover" not in made
    assert "munderover" in mathematics.mathml(r"\sum_{i=0}^k", block=True)


def test_an_unknown_command_is_an_error():
    with pytest.raises(MathError):
        mathematics.mathml(r"\nonsense", block=False)


def test_the_font_has_what_formulas_need_and_delimiters_of_one_width():
    font = TTFont(io.BytesIO(mathematics.font()))
    glyphs = font.getBestCmap()
    assert {ord(sign) for sign in "x∇⟨⟩‖√∑′⊘⊥ηλ𝑥ℝ"} <= set(glyphs)
    variants = font["MATH"].table.MathVariants
    sizes = variants.VertGlyphConstruction[variants.VertGlyphCoverage.glyphs.index(glyphs[ord("√")])]
    widths = {font["hmtx"][size.VariantGlyph][0] for size in sizes.MathGlyphVariantRecord}
    assert len(sizes.MathGlyphVariantRecord) > 1
    assert len(widths) == 1


def test_tables_and_bars_of_docstrings():
    lines = [
        "Largest |cos(x)| of `a|b`s.",
        "",
        "| a | b |",
        "|---|---|",
        "| 1 | |",
        "",
        ">>> print(table)",
        "| a |",
        "|---|",
    ]
    assert list(docstrings.translated(lines)) == [
        r"Largest \|cos(x)\| of `a|b`\ s.",
        "",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - a",
        "     - b",
        "   * - 1",
        "     -",
        "",
        "",
        ">>> print(table)",
        "| a |",
        "|---|",
    ]
