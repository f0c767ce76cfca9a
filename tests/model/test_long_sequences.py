"""Mixers with a state: long sequences cost less than attention's, and generation continues from as many bytes
after 8,192 tokens as after 1,024.

    python -m pytest tests/model/test_long_sequences.py -s

prints the tables of lab/docs/benchmarks.md. Times are CPU-seconds of one thread, the least of the rounds, in
which all kinds take turns. No test depends on them.
"""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from build import build_run
from config.reading import resolve
from model.context import GenerationCache, forward_context
from parallel.topology.mesh import Mesh

SEQ, VOCAB, ROUNDS = 16_384, 257, 2
WIDTH = ["--model.layers", "2", "--model.hidden", "256", "--model.mlp.width", "512"]
HEADS = ["--model.mixer.heads", "4"]
KINDS = {  # of one width: four heads of 64 channels
    "attention": "--model.mixer.kv_heads 4 --model.mixer.head_dim 64",
    "delta": "--model.mixer.kind delta --model.mixer.key_dim 64 --model.mixer.v_dim 64",
    "kimi": "--model.mixer.kind kimi --model.mixer.dim 64",
    "mamba": "--model.mixer.kind mamba --model.mixer.dim 64 --model.mixer.state 64",
}


def made(kind, seq_len):
    words = [*WIDTH, *HEADS, *KINDS[kind].split(), "--model.vocab", str(VOCAB), "--model.context", str(SEQ)]
    words += ["--train.seq_len", str(seq_len), "--train.micro_batch", "1", "--train.global_batch", "1"]
    words += ["--train.dtype", "fp32", "--train.steps", "9", "--train.tokens", "none"]
    cfg = resolve("llama3-tiny", None, words)
    data = SimpleNamespace(
        tokenizer=SimpleNamespace(fingerprint="none"), fingerprint="random", is_chat=False, has_start=False
    )
    return build_run(cfg, Mesh.single(), torch.device("cpu"), data, 9)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OperationCounter(TorchDispatchMode):
    """Counts the operations of torch, in the backward too."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))


def forward_and_backward(run):
    """Of the mixer of a layer, with its projections, over SEQ tokens."""
    x = torch.randn(1, SEQ, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    context = forward_context(run.cfg, torch.arange(SEQ)[None], None)
    run.stages[0].blocks[0].mixer(x, context).square().mean().backward()
    assert x.grad.norm() > 0


@pytest.mark.slow
def test_16_384_tokens_take_a_tenth_of_attentions_flops_in_few_operations(one_thread):
    """FLOPs and operations are counted, so that a busy machine changes nothing. Times are printed alone."""
    runs = {kind: made(kind, SEQ) for kind in KINDS}
    flops, operations = {}, {}
    for kind, run in runs.items():
        with OperationCounter() as counter, FlopCounterMode(display=False) as counted:
            forward_and_backward(run)
        flops[kind], operations[kind] = counted.get_total_flops(), counter.total

    seconds = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, run in runs.items():
            begin = time.process_time()
            forward_and_backward(run)
            seconds[kind].append(time.process_time() - begin)
    for kind, of_kind in seconds.items():
        ratio = min(seconds["attention"]) / min(of_kind)
        cost = f"{flops[kind] / 1e9:.0f} | {operations[kind]:,}"
        print(f"| {kind} | {min(of_kind):.2f} | {ratio:.1f} | {cost} |")

    for kind in KINDS.keys() - {"attention"}:
        assert flops[kind] < flops["attention"] / 10
        assert operations[kind] < 5 * SEQ  # token by token the forward alone has more


@pytest.mark.slow
@torch.no_grad()
def test_generation_keeps_as_many_bytes_at_8_192_tokens_as_at_1_024(one_thread):
    tokens = torch.randint(VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        stage, cache, held, seconds = made(kind, 1024).stages[0], GenerationCache(), {}, {}
        for length in (1024, 8192):
            while cache.length < length:
                positions = torch.arange(cache.length, cache.length + 1024)
                stage.hidden_states(tokens[:, positions], positions[None], cache=cache)
                cache.length += 1024
            begin = time.process_time()
            for _ in range(16):  # from here on one by one
                stage.logits(tokens[:, cache.length:][:, :1], torch.tensor([[cache.length]]), cache=cache)
                cache.length += 1
            seconds[length] = (time.process_time() - begin) / 16
            held[length] = sum(kept.nbytes for kept in cache.kept.values())
            cache.length = length
            if kind == "attention":
                for key, kept in cache.kept.items():
                    cache.kept[key] = kept[:, :length]
        print(f"| {kind} | {held[1024]:,} | {held[8192]:,} "
              f"| {1e3 * seconds[1024]:.1f} | {1e3 * seconds[8192]:.1f} |")
        grown = held[8192] / held[1024]
        assert grown == pytest.approx(8, rel=0.02) if kind == "attention" else grown == 1
