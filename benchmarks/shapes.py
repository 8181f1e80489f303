"""Shapes of the weights of known networks, for benchmarks that need no network."""

__all__ = ["RESNET18"]


def _resnet18() -> list[tuple[int, ...]]:
    """The CIFAR form: a 3 × 3 stem and four stages of two basic blocks."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3)]
    width = 64
    for out in (64, 128, 256, 512):
        shapes += [(out, width, 3, 3), (out, out, 3, 3)]
        if out != width:
            shapes.append((out, width, 1, 1))
        shapes += [(out, out, 3, 3)] * 2
        width = out
    return shapes


RESNET18 = _resnet18()
