"""The wire: all communication between ranks.

    connection.py     identifies a process group
    world.py          joining and leaving a job, process groups
    comm.py           groups of ranks, collectives and transfers; with world.py the only file that calls
                      torch.distributed
    clock.py          how long a rank waited, and how long exchanges overlapped with its computation
    device_waits.py   which exchange a GPU is waiting for
    strict.py         exchanges on private copies, for proofs
    algorithms.py     gradient reduction: collectives, ring, hierarchy, parameter server
    compress.py       8-bit exchanges
"""
