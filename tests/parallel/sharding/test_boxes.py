"""Box arithmetic against plain tensor slicing: every resharding, holes and overlaps by name, flat runs as
boxes.
"""

import random
from math import prod

import pytest
import torch

from parallel.sharding.boxes import Box, check_tiling, plan_read, uncovered_boxes
from parallel.sharding.ranges import range_boxes


def cut(rnd, n, pieces):
    """n as `pieces` uneven (start, size) runs, fewer where n is small."""
    marks = [0, *sorted(rnd.sample(range(1, n), min(pieces, n) - 1)), n]
    return [(a, b - a) for a, b in zip(marks, marks[1:])]


def grid(rnd, key, shape):
    """A random uneven grid of boxes that tile the shape, in random order."""
    boxes = [((), ())]
    for n in shape:
        runs = cut(rnd, n, rnd.randint(1, 4))
        boxes = [((*start, a), (*size, k)) for start, size in boxes for a, k in runs]
    boxes = [Box(key, shape, start, size) for start, size in boxes]
    rnd.shuffle(boxes)
    return boxes


def flat_shards(rnd, key, shape):
    """A ZeRO layout: uneven runs of the flat tensor, as boxes."""
    runs = cut(rnd, prod(shape), rnd.randint(1, 4))
    return [Box(key, shape, *box) for a, n in runs for box in range_boxes(shape, a, a + n)]


def part(t, box):
    return t[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]


def test_any_layout_reads_any_other():
    rnd = random.Random(0)
    for _ in range(300):
        shape = tuple(rnd.randint(1, 9) for _ in range(rnd.randint(0, 4)))
        truth = torch.arange(prod(shape)).view(shape)
        have, want = (rnd.choice([grid, flat_shards])(rnd, "w", shape) for _ in range(2))
        check_tiling(have)
        for box in want:
            mine = torch.full(box.size, -1)
            reads = plan_read(box, [Box.whole("other", shape), *have])
            for j, source, target in reads:
                assert (mine[target] == -1).all(), "an element is read twice"
                mine[target] = part(truth, have[j - 1])[source]
            assert torch.equal(mine, part(truth, box))


def test_minus_is_the_set_difference():
    rnd = random.Random(1)
    for _ in range(500):
        shape = tuple(rnd.randint(1, 6) for _ in range(rnd.randint(1, 3)))
        a, b = (rnd.choice(grid(rnd, "w", shape)) for _ in range(2))
        count = torch.zeros(shape, dtype=torch.int)
        for box in a.difference(b):
            part(count, box).add_(1)
        truth = torch.zeros(shape, dtype=torch.int)
        part(truth, a).fill_(1)
        part(truth, b).fill_(0)
        assert torch.equal(count, truth) and len(a.difference(b)) <= 2 * len(shape)


def test_a_hole_is_named_with_key_and_region():
    rnd = random.Random(2)
    for _ in range(200):
        shape = tuple(rnd.randint(2, 7) for _ in range(rnd.randint(1, 3)))
        have = grid(rnd, "layers.0.w", shape)
        lost = have.pop(rnd.randrange(len(have)))
        assert sum(h.volume for h in uncovered_boxes(Box.whole("layers.0.w", shape), have)) == lost.volume
        if have:
            with pytest.raises(ValueError, match=r"layers\.0\.w\[.*covers this region"):
                check_tiling(have)
        with pytest.raises(ValueError, match=r"layers\.0\.w\[.*covers this region"):
            plan_read(Box.whole("layers.0.w", shape), have)
        for box in have:
            plan_read(box, have)  # what is there is still readable
    with pytest.raises(ValueError, match=r"w\[2:4, 0:3\] of shape \(4, 3\)"):
        plan_read(Box.whole("w", (4, 3)), [Box("w", (4, 3), (0, 0), (2, 3))])


@pytest.mark.parametrize(
    "pieces, text",
    [
        ([((0,), (3,)), ((2,), (2,))], "overlap"),
        ([((0,), (2,)), ((0,), (2,)), ((2,), (2,))], "overlap"),
        ([((0,), (5,))], "does not lie inside"),
        ([((-1,), (4,)), ((3,), (1,))], "does not lie inside"),
        ([((0, 0), (4, 1))], "does not lie inside"),
    ],
)
def test_tiling_refuses(pieces, text):
    with pytest.raises(ValueError, match=text):
        check_tiling([Box("w", (4,), *p) for p in pieces])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"w: stored with shape \(4,\), wanted with \(5,\)"):
        plan_read(Box.whole("w", (5,)), [Box.whole("w", (4,))])
    with pytest.raises(ValueError, match="w: pieces disagree"):
        check_tiling([Box.whole("w", (4,)), Box.whole("w", (5,))])


def test_empty_and_scalar_tensors():
    check_tiling([Box.whole("s", ()), Box.whole("e", (0, 3))])
    assert plan_read(Box.whole("s", ()), [Box.whole("s", ())]) == [(0, (), ())]
    assert plan_read(Box.whole("e", (0, 3)), []) == []
    with pytest.raises(ValueError, match="covers"):
        plan_read(Box.whole("s", ()), [])


def test_ranges_are_few_boxes_in_order():
    rnd = random.Random(3)
    for _ in range(2000):
        shape = tuple(rnd.randint(1, 5) for _ in range(rnd.randint(0, 4)))
        a = rnd.randint(0, prod(shape))
        b = rnd.randint(a, prod(shape))
        t = torch.arange(prod(shape)).view(shape)
        boxes = range_boxes(shape, a, b)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert [x for box in boxes for x in part(t, Box("w", shape, *box)).flatten().tolist()] == list(
            range(a, b)
        )
    for bad in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="do not lie inside"):
            range_boxes((2, 3), *bad)
