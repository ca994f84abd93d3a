"""Decodes for real: one transformer, one engine, one loop, and drafts as values. PyTorch, CPU and CUDA."""
