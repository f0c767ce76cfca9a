"""The wire: everything that ranks send each other.

    comm.py         groups of ranks, collectives and transfers; the only file that speaks to torch.distributed
    clock.py        how long a rank waited, and how long exchanges ran beside its computation
    algorithms.py   how gradients are summed: collectives, ring, hierarchy, parameter server
    compress.py     exchanges in 8 bits an element
"""
