"""Settings for every test: one thread per worker, so that the workers do not fight over the cores."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# A busy machine is slow, not wrong; failures print what reproduces them.
settings.register_profile("steradian", deadline=None, print_blob=True)
settings.load_profile("steradian")
