"""Parallelism: which rank does what, and what ranks send each other. Later entries build on earlier ones.

    wire/           process groups, collectives and point-to-point transfers
    topology/       degrees of parallelism -> process groups
    microbatch.py   what a rank's model sees at once
    rng.py          dropout that is the same under every layout
    context/        one sequence over several ranks: ring attention, Ulysses
    offload.py      activations and optimizer state in host memory
    sharding/       flat parameter buckets, ZeRO
    tensor/         linear layers, embedding and norms sharded over ranks
    expert/         dispatch tokens to the ranks of their experts and combine the results
    pipeline/       schedules and their executor
"""
