"""The nodes that contain a node of a page."""

from collections.abc import Iterator

from docutils import nodes


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    """The nodes above one, its parent first."""
    above = node.parent
    while above is not None:
        yield above
        above = above.parent
