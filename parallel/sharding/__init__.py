"""What data-parallel ranks share: flat buckets of parameters, and ZeRO (arXiv 1910.02054).

    spec.py        ParameterSpec: what a parameter holds of which global tensors
    boxes.py       rectangles of global tensors: checkpoints, resharding
    ranges.py      a range of a flat tensor as boxes
    packing.py     how parameters lie in flat buckets: arithmetic alone, read by the planner too
    slots.py       what a bucket is made of
    bucket.py      Bucket: parameters that are reduced, gathered and updated together
    weights.py     BucketWeights: their weights and masters, whole or sharded
    gradients.py   BucketGrads: their gradients, and the sum over data-parallel ranks
    powersgd.py    low-rank compression of the gradients' sum (arXiv 1905.13727)
    views.py       what the optimizer, clipping and checkpoints read of a bucket
    zero.py        ZeroScheduler: when each exchange starts, and when it must have ended
"""
