"""Attention and kernels on CUDA, by FlashInfer and Triton."""
