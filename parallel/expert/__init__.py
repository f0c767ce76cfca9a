"""Expert parallelism (GShard, arXiv 2006.16668; folded out of dp x cp x tp: arXiv 2504.14960).

    dispatch.py   dispatch tokens to the ranks of their experts and combine the results
    bounded.py    the same with a fixed number of rows between two ranks
    coded.py      rows that travel to their experts in 8 bits
"""
