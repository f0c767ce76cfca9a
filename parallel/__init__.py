"""Parallelism: which rank does what, and what ranks send each other. Later lines build on earlier ones.

    wire/           groups of ranks, collectives and transfers
    topology/       degrees of parallelism -> groups of ranks
    microbatch.py   what a rank's model sees at once
    rng.py          dropout that is the same under every layout
    context/        one sequence over several ranks: ring attention, Ulysses
    offload.py      host memory instead of the device's
    sharding/       flat buckets of parameters, ZeRO
    tensor/         linear layers, embedding and norms divided over ranks
    expert/         tokens to the ranks of their experts, and back
    pipeline/       schedules, and what runs them
"""
