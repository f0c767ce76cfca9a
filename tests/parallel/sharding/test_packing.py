"""parallel/sharding/packing.py: parameters fill buckets in their order, and shards divide a bucket."""

import random

from parallel.sharding.packing import bucket_layout, pack_into_buckets, round_up


def test_buckets_are_filled_in_order_as_far_as_they_go():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice([1, 63, 64, 65, 200, 1000]) for _ in range(draw.randrange(12))]
        most = draw.choice([64, 128, 300, 1024])
        buckets = pack_into_buckets(sizes, most)
        assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
        filled = [sum(round_up(sizes[index]) for index in bucket) for bucket in buckets]
        for bucket, full, following in zip(buckets, filled, [*buckets[1:], None]):
            assert full <= most or len(bucket) == 1
            assert following is None or full + round_up(sizes[following[0]]) > most


def test_shards_tile_a_bucket_and_slots_do_not_meet():
    draw = random.Random(1)
    for _ in range(300):
        sizes = [draw.randrange(1, 400) for _ in range(draw.randrange(1, 6))]
        shards, replicas, zero = draw.randrange(1, 5), draw.randrange(1, 4), draw.randrange(4)
        is_collective = draw.random() < 0.5
        layouts = [
            bucket_layout(sizes, zero=zero, num_shards=shards, shard_index=index, num_replicas=replicas,
                          is_collective=is_collective)
            for index in range(shards)
        ]
        offsets, size = layouts[0].offsets, layouts[0].size
        assert all((layout.offsets, layout.size) == (offsets, size) for layout in layouts)
        for begin, length, following in zip(offsets, sizes, [*offsets[1:], size]):
            assert begin % 64 == 0 and following - begin >= length
        ranks = shards if zero and is_collective else shards * replicas
        assert size % (64 * ranks) == 0 and size - offsets[-1] - round_up(sizes[-1]) < 64 * ranks
        owned = [(layout.shard_start, layout.shard_end) for layout in layouts]
        step = size // shards
        parts = [(step * index, step * (index + 1)) for index in range(shards)]
        assert owned == (parts if zero else [(0, size)] * shards)
