"""Tensor and sequence parallelism (arXiv 1909.08053, 2205.05198).

    regions.py   the exchanges at the boundaries of a tensor-parallel region, and their gradients
    overlap.py   async tensor parallelism: products of the parts of a sequence while others travel
    layers.py    linear layers, embedding and norms whose weights are divided over mesh.tp
"""
