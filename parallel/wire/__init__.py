"""The wire: everything that ranks send each other.

    connection.py     what identifies a process group
    world.py          joining and leaving a job, process groups
    comm.py           groups of ranks, collectives and transfers; with world.py the only file that calls
                      torch.distributed
    clock.py          how long a rank waited, and how long exchanges ran beside its computation
    device_waits.py   in which exchange a GPU is
    strict.py         exchanges on private copies, for proofs
    algorithms.py     how gradients are summed: collectives, ring, hierarchy, parameter server
    compress.py       exchanges in 8 bits an element
"""
