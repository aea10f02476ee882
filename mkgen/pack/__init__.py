"""Weights: from a checkpoint's tensors to the rows that the kernel reads, bit for bit."""
