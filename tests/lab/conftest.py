"""Fixtures of the lab's tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def exact() -> Iterator[None]:
    """Reproducible float32 on a GPU."""
    # Imported here, since this file may be read before Triton's interpreter is chosen.
    import torch

    from steradian.lab.fleet import prepare_device

    flags = torch.backends.cudnn
    before = flags.benchmark, flags.deterministic
    prepare_device(torch.device("cuda"), exact=True)
    yield
    flags.benchmark, flags.deterministic = before
