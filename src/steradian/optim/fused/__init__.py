"""The fused Adam step for NVIDIA GPUs, in Triton."""
