"""Settings for every test: one thread per worker, so that the workers do not fight over the cores."""

import importlib
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
# Without processes that compile: they outlive the test that starts them, and a later one is warned of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A busy machine is slow, not wrong; failures print what reproduces them.
settings.register_profile("steradian", deadline=None, print_blob=True)
settings.load_profile("steradian")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run: a process that only hands them out to workers need not import torch."""
    # A shell that runs the tests in the background has Ctrl-C ignored, and they are about what it does.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hands_out = config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput")
    if not hands_out:
        set_up_torch()


def set_up_torch() -> None:
    """Before any test module is imported."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    # Without a GPU the kernels run in Triton's interpreter; it must be chosen before Triton is imported.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # A kernel is interpreted or compiled as Triton finds it when the kernel is defined: define them now, before a test
    # that takes the variable away.
    importlib.import_module("steradian.optim.fused.table")
    # For each frame that it compiles torch flushes the caches and times the guards, to log it: a fifth of the
    # compilation.
    guards = importlib.import_module("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *arguments: 0.0


@pytest.fixture
def timm_starts(tmp_path, monkeypatch):
    """Processes that a test starts can import timm without torchvision, with which no architecture computes."""
    if find_spec("timm") is None:
        pytest.skip("needs timm")
    if find_spec("torchvision") is None:
        (tmp_path / "sitecustomize.py").write_text("import no_torchvision\n\nno_torchvision.stand_in()\n")
        path = [tmp_path, Path(__file__).parents[1] / "benchmarks", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
