"""optim.states 8bit: AdamW with the moments of arXiv 2110.02861, beside its formula in numpy; every layout
rounds alike, a resume goes on as if nothing had happened, and what cannot be converted is refused."""

import numpy as np
import pytest
import torch
from ranks import MODEL, corpus, job
from test_optimizers import DECAY, LR, STEPS, trained
from test_states import begin, loaded, made, saved, updated

from checkpoint import state
from checkpoint.disk import store
from config import ConfigError
from kernels.dynamic_codes import code_book, decode, encode
from optim.adamw_8bit import box_of_scales
from parallel.sharding.boxes import Box
from parallel.sharding.packing import block_size
from parallel.wire.world import World


def values_by_hand(signed: bool) -> np.ndarray:
    """Section 2.2: zero bits say the decade, what is left after the bit that ends them divides it linearly;
    without a sign one bit more divides it. The paper's library (bitsandbytes) takes the middles."""
    found = [0.0, 1.0]
    for zeros in range(7):
        bits = 6 - zeros + (not signed)
        edges = np.linspace(0.1, 1.0, 2**bits + 1)
        middles = 10.0**-zeros * (edges[1:] + edges[:-1]) / 2
        found += [*middles, *(-middles if signed else ())]
    return np.sort(found)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_values_of_the_paper(signed):
    book = code_book(signed, torch.float64, torch.device("cpu"))
    np.testing.assert_allclose(book.values.numpy(), values_by_hand(signed), rtol=1e-14)
    assert len(book.values) == 256 == len(book.values.unique()) and book.values[book.zero] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_value_of_its_block(signed, dtype):
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=dtype) ** 5
    x = x if signed else x.abs()
    x[3], x[5, 2] = 0.0, 0.0
    codes, scales = encode(x.flatten(), 8, signed)
    assert codes.dtype == torch.uint8 and torch.equal(scales, x.abs().amax(1))
    values = values_by_hand(signed)
    decoded = decode(codes, scales, signed).view(40, 8).numpy()
    for row, scale, found in zip(x.numpy(), scales.numpy(), decoded):
        distances = np.abs(row[:, None] - values * scale)
        assert (np.abs(row - found) <= distances.min(1) * (1 + 1e-5) + 1e-6 * scale).all()
        assert (found[row == 0] == 0).all()
        assert (found[row == scale] == scale).all()


def rounded(x: np.ndarray, block: int, signed: bool) -> np.ndarray:
    """Each number as the nearest value of its block."""
    rows, values = x.reshape(-1, block), values_by_hand(signed)
    scales = np.abs(rows).max(1, keepdims=True)
    relative = (rows / np.where(scales > 0, scales, 1)).reshape(-1, 1)
    nearest = values[np.abs(relative - values).argmin(1)]
    return (nearest.reshape(rows.shape) * scales).reshape(x.shape)


def test_twenty_steps_are_those_of_the_formula():
    start, grads, end, run = trained("adamw", states="8bit")
    assert {flat.dtype for flats in run.optim.state().values() for flat in flats} == {torch.uint8}
    for key, weight in start.items():
        w = weight.numpy().copy()
        m, v = np.zeros_like(w), np.zeros_like(w)
        block = {32: 4, 48: 2}[w.shape[-1]]
        for step, g in enumerate((each[key].numpy() for each in grads), 1):
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            root = np.sqrt(v / (1 - 0.95**step)) + 1e-8
            w = w * (1 - LR * DECAY * (w.ndim > 1)) - LR * m / (1 - 0.9**step) / root
            m, v = rounded(m, block, signed=True), rounded(v, block, signed=False)
        np.testing.assert_allclose(end[key].numpy(), w, rtol=1e-11, atol=1e-12, err_msg=key)
    plain = trained("adamw")[2]
    away = max(float((end[key] - plain[key]).abs().max()) for key in plain)
    assert 1e-4 < away < STEPS * LR  # it rounds


@pytest.mark.parametrize("shape, block", [
    ((4096,), 64), ((4096, 14336), 64), ((8, 896), 16), ((8, 18944), 64), ((32, 32), 4), ((64, 1, 4), 1),
    ((64, 1, 8), 1), ((5, 100), 1),
])
def test_blocks_divide_the_parts_of_eight_ranks(shape, block):
    assert block_size(shape) == block


def test_a_part_that_ends_inside_of_a_block_is_refused():
    whole = Box.whole("w", (16, 1024))
    assert box_of_scales(whole).size == (16, 16)
    assert box_of_scales(Box("w", (16, 1024), (3, 128), (1, 64))) == Box("w", (16, 16), (3, 2), (1, 1))
    with pytest.raises(ConfigError, match=r"^optim.states: 8bit .* each 64 columns .* w\[0:16, 0:96\]"):
        box_of_scales(Box("w", (16, 1024), (0, 0), (16, 96)))


LAYOUTS = [
    ("llama3.2-tiny", dict(zero=1)), ("llama3.2-tiny", dict(zero=3, tp=2)), ("gpt2-tiny", dict(tp=4)),
    ("llama3.2-tiny", dict(pp=2, tp=2, schedule="zb-v")), ("llama3.2-tiny", dict(dp_rep=2, zero=1)),
    ("mixtral-tiny", dict(tp=2, ep=2, etp=2, zero=1)),
]


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("name, parallel", LAYOUTS, ids=str)
def test_every_layout_rounds_alike(ranks, name, parallel):
    """Codes and scales, bit for bit, after three updates with the same gradients."""
    cfg = made(name, "bf16", "8bit")
    truth = {box.key: part for box, part in updated(World(), cfg)}
    dtypes = [part.dtype for part in truth.values()]
    assert dtypes.count(torch.uint8) == sum("@adam_scale" in key for key in truth) == len(truth) * 2 // 5
    for pieces in ranks(4).run(updated, made(name, "bf16", "8bit", **parallel)):
        for box, part in pieces:
            whole = truth[box.key]
            inside = tuple(slice(a, a + n) for a, n in zip(box.start, box.size))
            assert torch.equal(part, whole[inside]), box


def test_a_resume_goes_on_bit_for_bit(tmp_path):
    cfg = made("llama3-tiny", "bf16", "8bit")
    then = saved(World(), cfg, tmp_path)
    ((_, path),) = store.committed_checkpoints(tmp_path)
    pieces = store.read_index(path)["pieces"]
    assert {piece["dtype"] for piece in pieces if piece["key"].endswith(("@adam_m", "@adam_v"))} == {"U8"}
    notes, again = loaded(World(), cfg, path)
    assert again == then and not notes


@pytest.mark.slow
def test_another_layout_goes_on_the_same(ranks, tmp_path):
    """The arithmetic in fp64: what differs between layouts is far below what turns a rounding."""
    then = ranks(2).run(saved, made("llama3.2-tiny", "fp64", "8bit", tp=2), tmp_path)[0]
    ((_, path),) = store.committed_checkpoints(tmp_path)
    for world, parallel in ((2, dict(zero=3)), (4, dict(pp=2, zero=1))):
        for _, again in ranks(world).run(loaded, made("llama3.2-tiny", "fp64", "8bit", **parallel), path):
            assert again == pytest.approx(then, rel=1e-9)


@pytest.mark.parametrize("was, now", [("fp32", "8bit"), ("8bit", "bf16")])
def test_moments_are_not_converted(tmp_path, was, now):
    saved(World(), made("llama3-tiny", "bf16", was), tmp_path)
    ((_, path),) = store.committed_checkpoints(tmp_path)
    run, _ = begin(World(), made("llama3-tiny", "bf16", now))
    with pytest.raises(ConfigError, match=f"^optim.states: .* trained with {was}, not {now}; set it back"):
        state.load(run, store.quick_check(path))
    state.load_weights(run.buckets, path)  # checkpoint.init_from


def test_a_skipped_step_changes_no_code():
    run, _ = begin(World(), made("llama3-tiny", "fp32", "8bit"))
    flats = state.state_boxes(run.buckets, run.optim.state())
    keep = lambda: [t.clone() for _, t in flats + run.optim.boxes()]
    for step in (1, 2):
        for bucket in run.buckets:
            bucket.grads.local.normal_(generator=torch.Generator().manual_seed(step))
        before = keep()
        run.optim.update(step, 1e-2, torch.tensor(1.0), torch.tensor(step == 1))  # as on a device
        assert all(map(torch.equal, before, keep())) == (step == 2)


@pytest.mark.parametrize("words, what", [
    ("--optim.name lion", "optim.states: 8bit is of adamw, and optim.name=lion"),
    ("--parallel.offload optimizer", "parallel.offload: optimizer does not move moments in 8 bits"),
])
def test_what_does_not_go_with_it_is_refused(tmp_path, words, what):
    prefix = corpus(tmp_path)
    place = ["--data.path", prefix, "--log.dir", str(tmp_path / "runs")]
    end = job(tmp_path / "j", 1, [*MODEL, *place, "--optim.states", "8bit", *words.split()])
    (line,) = end.errors()
    assert end.codes == [2] and line.startswith(f"error: {what}") and not (tmp_path / "runs").exists()
