"""Shapes of the weights of known networks, for benchmarks that need no network."""

import itertools

__all__ = ["RESNET18", "SETS"]

Shapes = list[tuple[int, ...]]


def _resnet18() -> Shapes:
    """The CIFAR form: a 3 × 3 stem and four stages of two basic blocks."""
    shapes: Shapes = [(64, 3, 3, 3)]
    width = 64
    for out in (64, 128, 256, 512):
        shapes += [(out, width, 3, 3), (out, out, 3, 3)]
        if out != width:
            shapes.append((out, width, 1, 1))
        shapes += [(out, out, 3, 3)] * 2
        width = out
    return shapes


def _resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7)]
    width = 64
    for middle, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(middle, width, 1, 1), (middle, middle, 3, 3), (4 * middle, middle, 1, 1)]
            if block == 0:
                shapes.append((4 * middle, width, 1, 1))
            width = 4 * middle
    return shapes


def _vgg16() -> Shapes:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    return [(out, width, 3, 3) for width, out in itertools.pairwise(widths)]


def _convnext_b() -> Shapes:
    shapes: Shapes = [(128, 3, 4, 4)]
    width = 128
    for dim, blocks in ((128, 3), (256, 3), (512, 27), (1024, 3)):
        if dim != width:
            shapes.append((dim, width, 2, 2))
        shapes += [(dim, 1, 7, 7), (4 * dim, dim), (dim, 4 * dim)] * blocks
        width = dim
    return shapes


def _vit_l() -> Shapes:
    return [(1024, 3, 16, 16)] + [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 24


def _transformer() -> Shapes:
    """0.5 B parameters in 24 layers of width 1280: queries, keys, values, output, up and down."""
    return ([(1280, 1280)] * 4 + [(5120, 1280), (1280, 5120)]) * 24


RESNET18 = _resnet18()
SETS: dict[str, Shapes] = {
    "ResNet18": RESNET18,
    "ResNet50": _resnet50(),
    "VGG16": _vgg16(),
    "ConvNeXt-B": _convnext_b(),
    "ViT-L": _vit_l(),
    "0.5 B transformer": _transformer(),
    "1.07 B in rows of 4096": [(262144, 4096)],
}
