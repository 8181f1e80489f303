"""Settings for every test: one thread per worker, so that the workers do not fight over the cores."""

import importlib
import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

# Without a GPU the kernels run in Triton's interpreter; it must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A kernel is interpreted or compiled as Triton finds it when the kernel is defined: define them now, before a test
# that takes the variable away.
importlib.import_module("steradian.optim._fused")

# For each frame that it compiles torch flushes the caches and times the guards, to log it: a fifth of the compilation.
_dynamo_guards = importlib.import_module("torch._dynamo.guards")
if hasattr(_dynamo_guards, "profile_guard_manager"):
    _dynamo_guards.profile_guard_manager = lambda *arguments: 0.0

# A busy machine is slow, not wrong; failures print what reproduces them.
settings.register_profile("steradian", deadline=None, print_blob=True)
settings.load_profile("steradian")
