"""The fused steps of Adam and Angular for NVIDIA GPUs, in Triton."""
