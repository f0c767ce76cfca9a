"""Which rank is where.

    dims.py   ParallelDims: degrees of parallelism -> groups of ranks; arithmetic alone
    mesh.py   Mesh: one rank's view of them, a Group for each
"""
