"""Through train.train, on every rank: who reads which sample, over epochs, blends and a resume."""

import contextlib
from dataclasses import replace

import pytest
import torch
from program import Enough, corpus, settings, trained
from ranks import write_documents

from data.indexed import IndexedDataset
from data.loader import open_loader
from parallel.wire.world import World

SEQ, STEPS = 16, 3
SMALL = (
    "--model.layers", "2", "--model.hidden", "16", "--model.mlp.width", "16", "--train.global_batch", "64",
    "--train.micro_batch", "16", "--eval.sample", "0",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def prefix(home):
    return corpus(home)


def other(home) -> str:
    """A second data set: capital letters, where the first has small ones."""
    stream = torch.Generator().manual_seed(3)
    documents = (torch.randint(65, 91, (40,), generator=stream).tolist() for _ in range(30))
    return write_documents(home / "other", documents)


def read(world: World, cfg, folder: str) -> tuple[int, list, list]:
    """-> (which share of the data, [the windows of each step, of this rank], [the ids of each step, of all
    ranks])."""
    seen, windows, ids = {}, [], []

    def watch(point, step=None, **what):
        if point == "run.built":
            seen.update(what)
        elif point == "step.read":
            whole = [torch.cat((b.tokens, b.targets[:, -1:]), 1) for b in what["batches"]]
            assert [b.sequence_ids.tolist() for b in what["batches"]] == [
                list(range(b.sequence_ids[0], b.sequence_ids[0] + 16)) for b in what["batches"]
            ]
            numbers = [r for b in what["batches"] for r in b.sequence_ids.tolist()]
            windows.append(list(zip(numbers, map(tuple, torch.cat(whole).tolist()))))
            ids.append(seen["data"].sample_ids(step - 1))
            if step == STEPS:
                seen["data"].close()
                raise Enough

    with pytest.raises(Enough):
        trained(world, cfg, folder, watch)
    for b in seen["run"].buckets:
        b.weights.wait_unshard()
    return seen["run"].mesh.dp.index, windows, ids


def places(index: IndexedDataset, first: int, last: int) -> dict[tuple, int]:
    """{window: where it begins}, of tokens first .. last; every window has other letters."""
    text = index.read(first, last).tolist()
    found = {tuple(text[a : a + SEQ + 1]): first + a for a in range(len(text) - SEQ)}
    assert len(found) == len(text) - SEQ
    return found


MIXTURE = ("--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.width", "16")
LAYOUTS = [
    (1, "llama3-tiny", (), {}),
    (2, "llama3-tiny", (), {}),
    (2, "llama3-tiny", (), {"tp": 2}),
    (2, "llama3-tiny", (), {"pp": 2}),
    (4, "mixtral-tiny", MIXTURE, {"cp": 2, "ep": 4}),
    (4, "mixtral-tiny", MIXTURE, {"dp_rep": 2, "zero": 1, "ep": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("world, name, model, parallel", LAYOUTS, ids=str)
def test_every_rank_reads_its_samples_once(ranks, home, prefix, world, name, model, parallel):
    """Ranks with the same share read the same, all shares together every window of an epoch once, then the
    next epoch's; and each sample's number stands for one window."""
    cfg = settings(prefix, *SMALL, *model, "--train.steps", str(STEPS), name=name, parallel=parallel)
    folder = str(home / f"{world}-{'-'.join(parallel)}")
    told = [read(World(), cfg, folder)] if world == 1 else ranks(world).run(read, cfg, folder)
    shares: dict[int, list] = {}
    for share, windows, ids in told:
        assert shares.setdefault(share, windows) == windows and ids == told[0][2]
    assert len(shares) == world // (parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1))
    samples = []
    for step in range(STEPS):
        step_windows = [pair for share in sorted(shares) for pair in shares[share][step]]
        # the place in the global batch, which dropout's masks follow
        assert [row for row, _ in step_windows] == list(range(64))
        samples += list(zip(told[0][2][step], (window for _, window in step_windows)))
    data = open_loader(cfg, "train", 0, 1)
    data.close()
    source = data.datasets[0]
    where = places(source.index, *source.split_points[:2])
    assert STEPS * 64 > data.samples > 64  # more than an epoch, less than two
    starts = [where[window] for _, window in samples]
    epoch, rest = sorted(starts[: data.samples]), sorted(starts[data.samples :])
    assert [b - a for a, b in zip(epoch, epoch[1:])] == [SEQ] * (data.samples - 1)
    assert len(set(rest)) == len(rest) and len({a % SEQ for a in rest}) == 1
    assert len({number for number, _ in samples}) == len(samples)
    for number, window in samples[: data.samples]:
        # the number of a first epoch's sample is that of its window
        assert where[window] == epoch[0] + number * SEQ
    assert starts[: data.samples] != epoch  # and they come in another order


def test_a_blend_reads_each_set_once_an_epoch(ranks, home, prefix):
    """Two ranks; one of three samples is the second set's, which is through more than once. Even ids are
    the first set's."""
    cfg = settings(prefix, *SMALL, "--train.steps", str(STEPS))
    cfg = replace(cfg, data=replace(cfg.data, path=f"2 {prefix} 1 {other(home)}"))
    (_, left, ids), (_, right, _) = ranks(2).run(read, cfg, str(home / "blend"))
    samples = []
    for step in range(STEPS):
        samples += zip(ids[step], (window for _, window in left[step] + right[step]))
    data = open_loader(cfg, "train", 0, 1)
    data.close()
    for d, source in enumerate(data.datasets):
        where = places(source.index, *source.split_points[:2])
        mine = [(number, window) for number, window in samples if number % 2 == d]
        assert abs(len(mine) - len(samples) * (2, 1)[d] / 3) <= 1
        count = (source.split_points[1] - source.split_points[0] - 1) // SEQ
        starts = [where[window] for _, window in mine]  # KeyError: of the other set, or of another split
        n = min(count, len(starts))
        assert len(set(starts[:n])) == n and {a % SEQ for a in starts[:n]} == {starts[0] % SEQ}
        assert len({number for number, _ in mine}) == len(mine)


def read_until(world: World, cfg, folder: str, stop: int) -> dict[int, list[tuple]]:
    """{step: the windows that this rank reads of it}; the run ends within step `stop`, or is through."""
    seen, windows = {}, {}

    def watch(point, step=None, **what):
        if point == "run.built":
            seen.update(what)
        elif point == "step.read":
            rows = torch.cat([torch.cat((b.tokens, b.targets[:, -1:]), 1) for b in what["batches"]])
            windows[step] = list(map(tuple, rows.tolist()))
            if step == stop:
                seen["data"].close()
                raise Enough

    with contextlib.suppress(Enough):
        trained(world, cfg, folder, watch)
    return windows


@pytest.mark.slow
def test_a_resume_reads_what_an_unbroken_run_reads(ranks, home, prefix):
    """Ended within step 3, after a save at step 2; then on one rank, and on two that share the batch."""
    cfg = settings(prefix, *SMALL, "--train.steps", "4", "--checkpoint.every", "2")
    whole = read_until(World(), cfg, str(home / "whole"), 0)
    for world in (1, 2):
        folder = str(home / f"broken-{world}")
        assert list(read_until(World(), cfg, folder, 3)) == [1, 2, 3]
        if world == 1:
            parts = [read_until(World(), cfg, folder, 0)]
        else:
            parts = ranks(2).run(read_until, cfg, folder, 0)
        assert all(list(part) == [3, 4] for part in parts)
        assert all(sum((part[step] for part in parts), []) == whole[step] for step in (3, 4))
    assert len({window for step in whole.values() for window in step}) > 2 * 64
