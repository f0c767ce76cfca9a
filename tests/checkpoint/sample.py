"""Small tensors to save, ways to cut them, and ranks made of threads: shared by the tests of this folder."""

import json
import threading

import torch

from checkpoint.disk import folder, store
from checkpoint.disk.together import Ranks
from parallel.sharding.boxes import Box
from parallel.sharding.ranges import range_boxes

torch.set_num_threads(1)
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    torch.bool,
)


def state(seed, shapes=((5, 4), (6,), (), (3, 2, 4), (0, 2))):
    """{key: tensor} of every dtype, some of them transposed views."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for dtype in DTYPES:
        for i, shape in enumerate(shapes):
            t = (torch.randn(shape[::-1], generator=g).abs() * 9).to(dtype)
            out[f"{str(dtype)[6:]}.{i}"] = t.permute(list(range(len(shape)))[::-1])
    return out


def whole(tensors):
    return [(Box.whole(k, t.shape), t) for k, t in tensors.items()]


def blank(tensors):
    return {k: torch.full_like(t, 1, memory_format=torch.contiguous_format) for k, t in tensors.items()}


def loaded(path, like, **more):
    got = blank(like)
    store.load(path, whole(got), **more)
    return got


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def part(t, box):
    return t[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]


def layout(rnd, tensors):
    """The tensors cut at random into flat runs, as ZeRO does. Returns [(Box, view)] in random order."""
    out = []
    for key, t in tensors.items():
        shape, cuts = tuple(t.shape), sorted(rnd.randint(0, t.numel()) for _ in range(rnd.randint(0, 3)))
        ends = [0, *cuts, t.numel()]
        boxes = [Box(key, shape, *box) for a, b in zip(ends, ends[1:]) for box in range_boxes(shape, a, b)]
        out += [(box, part(t, box)) for box in boxes or [Box.whole(key, shape)]]
    rnd.shuffle(out)
    return out


def reseal(path, change):
    """Edits index.json as an attacker would: with a correct checksum."""
    data = json.loads((path / "index.json").read_text())
    change(data)
    text = json.dumps(data).encode()
    (path / "index.json").write_bytes(text)
    (path / "index.sha256").write_bytes(folder.seal_index(text))


def ranks(n):
    """together.Ranks for n threads."""
    slots, barrier = [None] * n, threading.Barrier(n, timeout=20)

    def gather(rank, x):
        slots[rank] = x
        barrier.wait()
        every = list(slots)
        barrier.wait()
        return every

    def of_rank(rank):
        return Ranks(
            rank,
            n,
            gather=lambda x: gather(rank, x),
            gather_first=lambda x: gather(rank, x) if rank == 0 else gather(rank, x)[:0],
            broadcast=lambda x: gather(rank, x)[0],
        )

    return [of_rank(rank) for rank in range(n)]


def save_in_threads(root, step, parts, at=lambda rank, point: None):
    """store.save as len(parts) ranks; returns each rank's result or exception."""
    out = [None] * len(parts)

    def one(rank, among):
        try:
            out[rank] = store.save(
                root,
                step,
                parts[rank],
                {"ranks": len(parts)},
                keep=2,
                fault_point=lambda point: at(rank, point),
                ranks=among,
            )
        except Exception as e:
            out[rank] = e

    threads = [threading.Thread(target=one, args=(r, g)) for r, g in enumerate(ranks(len(parts)))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out
