"""The lab's own kernels for narrow networks on GPUs; `docs/decisions/0010-own-convolutions.md` explains them."""
