"""Tensor and sequence parallelism (arXiv 1909.08053, 2205.05198).

    regions.py   the exchanges at the boundaries of a tensor-parallel region, and their gradients
    layers.py    linear layers, embedding and norms whose weights are divided over mesh.tp
"""
