"""Networks that benchmarks need and torch does not have."""

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["resnet18"]


class Block(nn.Module):
    """Two 3 × 3 convolutions with batch normalization, and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        h = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet18 for 32 × 32 images (64-128-256-512, 3 × 3 stem), as in the paper's experiments, or a narrower one."""
    stages = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *(Block(channels * width, out * width, stride) for channels, out, stride in stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )
