"""What several tests of the lab start from."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def exact() -> Iterator[None]:
    """float32 on a GPU, the same every time."""
    # Imported here, since this file may be read before it is settled how Triton runs the kernels.
    import torch

    from steradian.lab.fleet import prepare_device

    flags = torch.backends.cudnn
    before = flags.benchmark, flags.deterministic
    prepare_device(torch.device("cuda"), exact=True)
    yield
    flags.benchmark, flags.deterministic = before
