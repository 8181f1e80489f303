"""Networks for the lab."""

from torch import nn

__all__ = ["small_cnn"]


def small_cnn(classes: int = 10, width: int = 16) -> nn.Sequential:
    """Three convolutions with BN and a linear head, for digits-sized images.

    >>> [name for name, _ in small_cnn().named_children()]
    ['block1', 'block2', 'block3', 'pool', 'flatten', 'head']
    """
    model = nn.Sequential()
    channels = [1, width, 2 * width, 2 * width]
    for i, stride in enumerate((1, 2, 1), start=1):
        block = nn.Sequential()
        block.add_module("conv", nn.Conv2d(channels[i - 1], channels[i], 3, stride, padding=1, bias=False))
        block.add_module("bn", nn.BatchNorm2d(channels[i]))
        block.add_module("relu", nn.ReLU())
        model.add_module(f"block{i}", block)
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(channels[-1], classes))
    return model
