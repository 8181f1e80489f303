"""Docstrings are Markdown with Google's sections; their tables, bars and code are translated to reStructuredText."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

ROW = re.compile(r"^\s*\|.*\|\s*$")
RULE = re.compile(r"^\s*\|[\s:|-]+\|\s*$")
CODE = re.compile(r"(`[^`]*`)")
AUTOMODULE = re.compile(r"^\.\. automodule:: (\S+)\n(?!   :no-members:)", re.MULTILINE)
_kept: dict[str, list[str] | None] = {}


def translated(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring in reStructuredText.

    Args:
        lines: Google's sections are field lists already.
    """
    k, example = 0, False
    while k < len(lines):
        # The output of an example, up to the blank line that ends it, is not translated.
        example = bool(lines[k].strip()) and (example or lines[k].lstrip().startswith(">>>"))
        if not example and ROW.match(lines[k]) and k + 1 < len(lines) and RULE.match(lines[k + 1]):
            end = k + 2
            while end < len(lines) and ROW.match(lines[end]):
                end += 1
            yield from _table([lines[k], *lines[k + 2 : end]])
            k = end
        else:
            yield lines[k] if example else _text(lines[k])
            k += 1


def _table(rows: list[str]) -> Iterator[str]:
    indent = " " * (len(rows[0]) - len(rows[0].lstrip()))
    yield from ("", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", "")
    for row in rows:
        for k, cell in enumerate(row.strip().strip("|").split("|")):
            yield f"{indent}   {'  ' if k else '* '}- {_text(cell.strip())}".rstrip()
    yield ""


def _text(line: str) -> str:
    """A line with bars escaped, so that they are not substitutions, and with code that may be followed by a letter."""
    parts = CODE.split(line)
    for k in range(0, len(parts), 2):
        ended = k > 0 and parts[k][:1].isalnum()
        parts[k] = ("\\ " if ended else "") + parts[k].replace("|", r"\|")
    return "".join(parts)


def _keep(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep the text of attributes: napoleon would read anything before a colon as a type."""
    _kept[name] = list(lines) if what in ("attribute", "data", "property") else None


def _process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = list(translated(_kept.pop(name, None) or lines))


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Write the default factory of a dataclass as "...", which can be parsed."""
    return (signature and signature.replace("<factory>", "...")), returned


def _leave_mocks_alone(app: Sphinx) -> None:
    """Stop autodoc from importing the real module of a mocked base class to read its source."""
    for name in ("lightning.pytorch", "pytorch_lightning", "transformers"):
        ModuleAnalyzer.cache["module", name] = PycodeError(f"{name} is not imported for the documentation")


def _in_source_order(app: Sphinx) -> None:
    """Sort `__all__`, whose order autodoc follows, by the order in the source instead of the alphabet."""
    for page in Path(app.srcdir).glob("api/*.md"):
        for name in AUTOMODULE.findall(page.read_text(encoding="utf-8")):
            module = importlib.import_module(name)
            tree = ast.parse(inspect.getsource(module))
            places = {name: k for k, node in enumerate(tree.body) for name in _defined(node)}
            vars(module)["__all__"] = sorted(module.__all__, key=lambda name: places.get(name, len(places)))


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines in a module."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Translate after napoleon, which makes field lists of Google's sections."""
    app.connect("builder-inited", _in_source_order)
    app.connect("builder-inited", _leave_mocks_alone)
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _process, priority=600)
    app.connect("autodoc-process-signature", _signature)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
