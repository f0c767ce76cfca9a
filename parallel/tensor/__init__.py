"""Tensor and sequence parallelism (arXiv 1909.08053, 2205.05198).

    regions.py   exchanges at the boundaries of a tensor-parallel region, and their gradients
    overlap.py   async tensor parallelism: overlap the GEMMs of sequence chunks with their transfers
    layers.py    linear layers, embedding and norms whose weights are sharded over mesh.tp
"""
