"""Placement of ranks.

    dims.py   ParallelDims: degrees of parallelism -> groups of ranks; pure arithmetic
    mesh.py   Mesh: one rank's view of them, with a Group for each
"""
