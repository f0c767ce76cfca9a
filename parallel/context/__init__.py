"""Context parallelism: one sequence over several ranks.

    zigzag.py    which tokens of a sequence a rank holds, and which chunks see which
    ring.py      ring attention: keys and values travel around the ring of ranks
    ulysses.py   Ulysses: inside attention, heads are sharded instead of the sequence
"""
