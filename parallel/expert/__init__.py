"""Expert parallelism (GShard, arXiv 2006.16668; folded out of dp x cp x tp: arXiv 2504.14960).

    dispatch.py   dispatch tokens to the ranks of their experts and combine the results
"""
