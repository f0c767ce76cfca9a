"""Context parallelism: one sequence over several ranks.

    zigzag.py    which tokens of a sequence a rank has, and which of them see which others
    ring.py      ring attention: keys and values go round the ranks
    ulysses.py   Ulysses: inside attention, heads are divided instead of the sequence
"""
