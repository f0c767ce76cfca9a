"""Parameter and optimizer state sharding over data-parallel ranks: flat buckets, ZeRO (arXiv 1910.02054).

    spec.py        ParameterSpec: role of a parameter, and its part of the global tensors
    boxes.py       rectangles of global tensors: checkpoints, resharding
    ranges.py      a range of a flat tensor as boxes
    packing.py     layout of parameters in flat buckets: pure arithmetic, also used by the planner
    slots.py       slots, process groups and options of a bucket
    bucket.py      Bucket: parameters that are reduced, gathered and updated together
    weights.py     BucketWeights: their weights and masters, full or sharded
    gradients.py   BucketGrads: their gradients and the reduction over data-parallel ranks
    powersgd.py    low-rank compression of the gradient all-reduce (arXiv 1905.13727)
    views.py       views of the owned shard for the optimizer, clipping and checkpoints
    zero.py        ZeroHooks: when each exchange starts, and when it must have finished
"""
