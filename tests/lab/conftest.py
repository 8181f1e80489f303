"""What several tests of the lab start from."""

from collections.abc import Iterator

import pytest
import torch

from steradian.lab.fleet import prepare_device


@pytest.fixture
def exact() -> Iterator[None]:
    """float32 on a GPU, the same every time."""
    flags = torch.backends.cudnn
    before = flags.benchmark, flags.deterministic
    prepare_device(torch.device("cuda"), exact=True)
    yield
    flags.benchmark, flags.deterministic = before
