"""The documentation site: `make docs` builds it into build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import steradian  # noqa: E402

project = "Steradian"
author = "The Steradian developers"
copyright = author
version = release = steradian.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
    "mathematics",
    "names",
    "scripts",
]
exclude_patterns = ["_*"]
nitpicky = True
smartquotes_action = "D"  # dashes, but no quotes: "filter" and x' are code and mathematics

# Pages are Markdown that also reads well where it is not built.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Docstrings: Google's sections, Markdown's tables and code.
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "pytorch_lightning", "transformers"]  # they take longer than all the rest
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
nitpick_ignore_regex = [
    # Other libraries, whose documentation is not at hand without a network.
    ("py:.*", r"(abc|rich|torch|numpy|np|pandas|pd|collections|typing|pathlib|nn|lightning|transformers)\..*"),
    ("py:.*", r"(Tensor|Parameter|Module|Optimizer|Callback|Path|Iterable|Sequence|Mapping|Callable|Any|Self|NDArray)"),
]

html_theme = "furo"
html_title = "Steradian"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses on a site opened from disk
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5d7a", "color-brand-content": "#0b5d7a"},
    "dark_css_variables": {"color-brand-primary": "#6cc4e4", "color-brand-content": "#6cc4e4"},
}
pygments_style = "default"
pygments_dark_style = "github-dark"
