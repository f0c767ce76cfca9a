"""Settings that cannot run are refused before the start: each rule names its key and values that are
accepted, and ranks that were started differently are told which of them is the odd one, in one line for the
whole job.
"""

import errno
import itertools
import re
import shutil

import pytest
from ranks import MODEL, corpus, job

import config
import train
from config import ConfigError, LoraConfig, MTPConfig, MupConfig
from config.reading import resolve
from config.reading.kinds import every_path, members_of
from config.reading.rules import divisors
from config.reading.schedules import plan_pipeline
from config.tree import field_types, get_ranges, has_path, with_values
from model.attention import AttentionConfig
from model.delta import DeltaConfig, KimiConfig
from model.mamba import MambaConfig
from model.mla import LatentConfig
from model.mlp import SharedExpertsConfig
from model.rope import GrowthConfig, YarnScaling
from model.router import BalanceLossConfig, CapacityConfig, ExpertsConfig, RouterConfig
from runtime.failure import get_exit_code

SMALL_BATCH = "--model.vocab 500 --train.global_batch 48 --train.micro_batch 1 --train.seq_len 96"
BASE = resolve("llama3-tiny", None, SMALL_BATCH.split())


def changed(cfg, key: str, value):
    return with_values(cfg, {key: value})


def having(**keys):
    cfg = BASE
    for key, value in keys.items():
        cfg = changed(cfg, key.replace("__", "."), value)
    return cfg


KIMI = {"model__mixer": KimiConfig(heads=4)}
MAMBA = {"model__mixer": MambaConfig(heads=4)}
DELTA = {"model__mixer": DeltaConfig(heads=4)}
LATENT = {"model__mixer": LatentConfig(kv_rank=8)}
EXPERTS = {
    "model__mlp": ExpertsConfig(
        shared=SharedExpertsConfig(),
        router=RouterConfig(bias_rate=1e-3, aux=BalanceLossConfig(weight=0.1)),
        capacity=CapacityConfig(factor=1.0),
    )
}
YARN = {"model__mixer__rope__scaling": YarnScaling(factor=8.0)}


# {part, or key of one: settings with which a config has it}
WITH_PART = {
    "model.mixer": LATENT,
    **dict.fromkeys((f"model.mixer.{key}" for key in ("key_heads", "key_dim", "conv", "norm_eps")), DELTA),
    "model.mixer.dim": KIMI,
    "model.mixer.groups": MAMBA,
    "model.mixer.state": MAMBA,
    "model.mixer.dt_min": MAMBA,
    "model.mixer.rope.scaling": YARN,
    "model.mixer.growth": {"model__mixer__growth": GrowthConfig()},
    **dict.fromkeys((
        f"model.mlp.{part}" for part in ("experts", "top_k", "shared", "router", "router.aux", "capacity")
    ), EXPERTS),
    "model.lora": {"model__lora": LoraConfig()},
    "model.mtp": {"model__mtp": MTPConfig()},
    "model.mup": {"model__mup": MupConfig(base=64)},
}
# numbers whose ranges other rules have
OTHER_RANGES = {"train.loss_scale", "train.ema", "optim.decay_fraction"}
NUMBERS = {
    path: part
    for path, (part, key) in every_path(config.Config).items()
    if {*members_of(field_types(part)[key])} & {int, float}
}


def test_every_number_has_one_range():
    ranged = {path for path, part in NUMBERS.items() if path.rpartition(".")[2] in get_ranges(part)}
    assert ranged == NUMBERS.keys() - OTHER_RANGES and OTHER_RANGES <= NUMBERS.keys()


@pytest.mark.parametrize("key", sorted(NUMBERS))
def test_a_number_below_its_range_is_refused_first(key):
    keys = {} if has_path(BASE, key) else WITH_PART.get(key) or WITH_PART[key.rpartition(".")[0]]
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: -1(\.0)? must "):
        plan_pipeline(changed(having(**keys), key, -1), 1)


EIGHT = {"train__dtype": "fp8"}
MIXTURE = {"model__mlp": ExpertsConfig(width=48)}
FULL, SMALL = CapacityConfig(factor=1.0), CapacityConfig(factor=0.1)
REWINDS = {"optim__spike_sigma": 6.0, "optim__spike_rewind": 2}
NEGATIVE = BalanceLossConfig(weight=-1.0)
RECORDED_MIXTURE = {**MIXTURE, "train__dtype": "bf16"}
RECORDED_FULL = {**RECORDED_MIXTURE, "model__mlp__capacity": FULL}
# (settings that break one rule, world, the key that the line names, whether a value must be offered)
CASES = [
    (having(model__mixer=DeltaConfig(heads=4, key_heads=3)), 1, "model.mixer.key_heads", True),
    (having(model__mixer=DeltaConfig(heads=4, key_heads=1), parallel__tp=2), 2, "parallel.tp", True),
    (having(model__mixer=MambaConfig(heads=4, groups=3)), 1, "model.mixer.groups", True),
    (having(model__mixer=MambaConfig(heads=4), parallel__tp=2), 2, "parallel.tp", True),
    (having(model__mlp__activation="geglu", model__mlp__limit=2.0), 1, "model.mlp.limit", False),
    (having(checkpoint__memory_every=100), 1, "checkpoint.memory_every", False),
    (having(log__name=""), 1, "log.name", False),
    (having(train__loss_scale=3000.0), 1, "train.loss_scale", False),
    (having(train__loss_scale=2.0**25), 1, "train.loss_scale", False),
    (having(train__ema=1.0), 1, "train.ema", False),
    (having(train__ema=0.0), 1, "train.ema", False),
    (having(train__loss_scale_window=0), 1, "train.loss_scale_window", False),
    (having(model__mixer__heads=5), 1, "model.mixer.heads", True),
    (having(model__mixer__kv_heads=3), 1, "model.mixer.kv_heads", True),
    (having(model__mixer__head_dim=7), 1, "model.mixer.head_dim", True),
    (having(model__positions="learned", model__context=64), 1, "train.seq_len", True),
    (having(parallel__tp=4), 6, "parallel.tp", True),
    (having(parallel__pp=3), 4, "parallel.pp", True),
    (having(parallel__tp=3), 3, "model.mixer.heads", True),
    (having(parallel__tp=4, model__mixer=AttentionConfig(heads=12, kv_heads=6, head_dim=16)), 4,
     "model.mixer.kv_heads", True),
    (having(parallel__tp=4, model__mlp__width=386), 4, "model.mlp.width", True),
    (having(parallel__tp=4, model__vocab_multiple=2), 4, "model.vocab_multiple", True),
    (having(parallel__tp=4, parallel__sp=True, train__seq_len=98), 4, "train.seq_len", True),
    (having(parallel__cp=4, train__seq_len=100), 4, "train.seq_len", True),
    (having(parallel__cp=3, parallel__cp_kind="ulysses"), 3, "parallel.cp_kind", False),
    (having(parallel__pp=8), 8, "model.layers", True),
    (having(train__global_batch=49), 4, "train.global_batch", True),
    (having(parallel__dp_rep=2), 4, "parallel.dp_rep", True),
    (having(optim__states="bf16", optim__name="lion"), 1, "optim.states", False),
    (having(optim__states="8bit", optim__name="muon"), 1, "optim.states", False),
    (having(optim__states="8bit", parallel__offload="both"), 1, "parallel.offload", False),
    (having(optim__qk_clip=100.0, optim__states="bf16"), 1, "optim.qk_clip", False),
    (having(optim__qk_clip=100.0, **MAMBA), 1, "optim.qk_clip", False),
    (having(optim__qk_clip=100.0, model__mixer__qk_norm="unweighted"), 1, "optim.qk_clip", False),
    (having(optim__qk_clip=100.0, model__mixer__softcap=30.0), 1, "optim.qk_clip", False),
    (having(optim__qk_clip=0.0), 1, "optim.qk_clip", False),
    (having(optim__name="dion", optim__rank_fraction=0.0), 1, "optim.rank_fraction", False),
    (having(optim__name="dion", optim__rank_fraction=1.5), 1, "optim.rank_fraction", False),
    (having(optim__qk_clip=100.0, optim__groups="embedding: lr_factor 0"), 1, "optim.qk_clip", False),
    (having(parallel__ep=2), 2, "parallel.ep", False),
    (having(parallel__ep_chunks=2), 2, "parallel.ep_chunks", False),
    (having(**MIXTURE, parallel__ep=2, parallel__ep_chunks=0), 2, "parallel.ep_chunks", False),
    (having(parallel__ep_bound=1.5), 2, "parallel.ep_bound", False),
    (having(**MIXTURE, parallel__ep=2, parallel__ep_bound=0.9), 2, "parallel.ep_bound", False),
    (having(**MIXTURE, parallel__ep=2, parallel__ep_bound=1.5, model__mlp__capacity=FULL), 2,
     "parallel.ep_bound", False),
    (having(**MIXTURE, parallel__ep=2, parallel__ep_bound=1.5, parallel__ep_chunks=3), 2,
     "parallel.ep_chunks", True),
    (having(parallel__compress_tokens="fp8"), 2, "parallel.compress_tokens", False),
    (having(**MIXTURE, parallel__ep=3), 3, "parallel.ep", True),
    (having(**MIXTURE, parallel__ep=4), 2, "parallel.ep", True),
    (having(**MIXTURE, parallel__etp=5), 4, "parallel.etp", True),
    (having(**MIXTURE, parallel__ep=4, parallel__etp=2), 4, "parallel.ep", True),
    (having(**MIXTURE, model__mlp__top_k=9), 1, "model.mlp.top_k", True),
    (having(**MIXTURE, model__mlp__router__groups=3), 1, "model.mlp.router.groups", True),
    (having(**MIXTURE, model__mlp__router__group_top_k=2), 1, "model.mlp.router.group_top_k", True),
    (having(**MIXTURE, model__mlp__router__groups=4, model__mlp__top_k=3), 1, "model.mlp.top_k", True),
    (having(**MIXTURE, model__mlp__router__scores="sigmoid", model__mlp__router__groups=8,
            model__mlp__top_k=1), 1, "model.mlp.router.groups", True),
    (having(**MIXTURE, model__mlp__capacity=SMALL), 1, "model.mlp.capacity.factor", False),
    (having(**MIXTURE, model__mlp__router__jitter=1.0), 1, "model.mlp.router.jitter", False),
    (having(**MIXTURE, model__mlp__router__aux=NEGATIVE), 1, "model.mlp.router.aux.weight", False),
    (having(**MIXTURE, model__mlp__bias=True, parallel__etp=3), 3, "parallel.etp", True),
    (having(**MIXTURE, parallel__tp=4, train__seq_len=98), 4, "train.seq_len", True),
    (having(**LATENT, model__mixer__rope_dim=5), 1, "model.mixer.rope_dim", True),
    (having(**YARN, model__mixer__rope__scaling__low_freq=33.0), 1, "model.mixer.rope.scaling.low_freq",
     False),
    (having(model__mtp=MTPConfig(modules=-1)), 1, "model.mtp.modules", False),
    (having(train__cuda_graphs=True), 2, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, parallel__pp=2), 2, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, log__noise_scale=True), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, log__inside_every=10), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, optim__qk_clip=100.0), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, log__routing_every=1, **RECORDED_MIXTURE), 1,
     "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, train__replay_routing="runs/a", **RECORDED_MIXTURE), 1,
     "train.cuda_graphs", False),
    (having(log__routing_every=1), 1, "log.routing_every", False),
    (having(train__replay_routing="runs/a"), 1, "train.replay_routing", False),
    (having(**MIXTURE, log__routing_every=1, **REWINDS), 1, "log.routing_every", False),
    (having(**MIXTURE, train__replay_routing="runs/a", **REWINDS), 1, "train.replay_routing", False),
    (having(train__cuda_graphs=True, train__device="cpu"), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, parallel__offload="activations"), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, parallel__zero=3), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, train__dtype="fp32", **MIXTURE), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, **RECORDED_MIXTURE), 2, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, **RECORDED_FULL), 1, "train.cuda_graphs", False),
    (having(train__cuda_graphs=True, **{**RECORDED_MIXTURE, "model__mlp": ExpertsConfig(width=50)}), 1,
     "train.cuda_graphs", False),
    (having(model__mup=MupConfig(base=0)), 1, "model.mup.base", False),
    (having(model__mup=MupConfig(base=-64)), 1, "model.mup.base", False),
    *(
        (having(model__mup=MupConfig(base=64), optim__name=name), 1, "model.mup", False)
        for name in ("sgd", "lamb", "lars")
    ),
    (having(train__fp8="rowwise"), 1, "train.fp8", False),
    (having(**EIGHT, **MIXTURE, train__fp8="nvfp4"), 1, "train.fp8", False),
    (having(**EIGHT, train__fp8="nvfp4", train__fp8_block=32), 1, "train.fp8_block", False),
    (having(train__dtype="fp64", train__fp8="nvfp4", train__fp8_block=12), 1, "train.fp8_block", True),
    (having(**EIGHT, train__fp8_keep=2), 1, "train.fp8_keep", True),
    (having(**EIGHT, train__fp8_keep=-1), 1, "train.fp8_keep", False),
    (having(**EIGHT, **MIXTURE, parallel__etp=2), 2, "parallel.etp", False),
    (having(**EIGHT, **{**MIXTURE, "model__mlp": ExpertsConfig(width=100)}), 1, "train.dtype", False),
    (having(**EIGHT, model__mlp=ExpertsConfig(width=64), train__fp8="blockwise", train__fp8_block=64,
            parallel__etp=2), 2, "train.fp8_block", True),
    (having(**EIGHT, model__mixer__kv_heads=2, parallel__tp=4), 4, "parallel.tp", True),
    (having(**EIGHT, train__seq_len=100), 1, "train.seq_len", True),
    (having(**EIGHT, model__mlp__width=384, parallel__tp=4, model__mixer__head_dim=24), 4, "parallel.tp",
     False),
    (having(**EIGHT, train__fp8="blockwise", train__fp8_block=24), 1, "train.fp8_block", True),
    (having(**EIGHT, train__fp8="blockwise", train__fp8_block=64), 1, "train.fp8_block", True),
    (having(log__noise_scale=True, parallel__cp=2), 2, "log.noise_scale", False),
    (having(log__noise_scale=True, model__mixer__kv_heads=1, parallel__tp=2), 2, "log.noise_scale", False),
    (having(train__ramp="8,8"), 4, "train.ramp", True),
    (having(train__ramp="8,0,100"), 4, "train.ramp", True),
    (having(train__ramp="8,7,100"), 4, "train.ramp", True),
    (having(train__ramp="48,8,100"), 4, "train.ramp", True),
    (having(train__ramp="6,6,100"), 4, "train.ramp", True),
    (having(train__ramp="16,4,100", parallel__pp=2, parallel__schedule="interleaved", train__micro_batch=2),
     4, "train.ramp", True),
]


def offers(text: str) -> list[tuple[str, object]]:
    found = re.search(r"; try ([a-z0-9_.]+) ([\d, ]+)", text)
    if found and found[1] == "train.ramp":
        return [(found[1], found[2])]
    return [(found[1], int(v)) for v in found[2].split(",")] if found else []


@pytest.mark.parametrize(
    "cfg, world, key, offered", CASES, ids=[f"{c[2]}-{c[1]}-{i}" for i, c in enumerate(CASES)]
)
def test_each_rule_names_its_key_and_values_that_pass(cfg, world, key, offered):
    with pytest.raises(ConfigError) as e:
        plan_pipeline(cfg, world)
    text = str(e.value)
    assert key.split(".")[1] in text and "\n" not in text
    assert offers(text) or not offered, text
    for name, value in offers(text):
        plan_pipeline(changed(cfg, name, value), world)


@pytest.mark.slow
def test_whatever_is_refused_in_any_world_offers_only_what_is_accepted():
    refused = helped = 0
    for world in range(1, 17):
        for tp, pp, zero in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5), (0, 1)):
            cfg = having(parallel__tp=tp, parallel__pp=pp, parallel__zero=zero)
            try:
                plan_pipeline(cfg, world)
                assert world % (tp * pp) == 0
            except ConfigError as e:
                refused += 1
                helped += bool(offers(str(e)))
                assert "\n" not in str(e) and re.match(r"(parallel|train|model)\.\w+", str(e)), e
                for name, value in offers(str(e)):
                    plan_pipeline(changed(cfg, name, value), world)  # the schedule agrees, too
    assert refused > 300 and helped > refused / 3
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    data = corpus(tmp_path_factory.mktemp("refusals"))
    return ["llama3-tiny", *MODEL, "--data.path", data, "--train.steps", "2", "--log.name", "r"]


def test_a_mistake_on_every_rank_is_one_line(tmp_path, args):
    end = job(tmp_path, 3, [*args, "--log.dir", str(tmp_path), "--parallel.tp", "2"])
    assert 2 in end.codes and set(end.codes) <= {2, -15}
    (line,) = end.errors()
    assert "does not divide the world size 3" in line
    assert not (tmp_path / "r").exists()  # refused before anything was made


@pytest.mark.parametrize("what", ["config", "code", "torch"])
def test_a_rank_that_was_started_differently_is_named(tmp_path, args, what):
    def before(rank):
        if rank == 1 and what == "code":
            config.code_hash = lambda: "other"
        if rank == 1 and what == "torch":
            train.torch.__version__ = "1.0"

    other = {1: ["--parallel.zero", "2"]} if what == "config" else {}
    words = [*args, "--log.dir", str(tmp_path), "--train.global_batch", "6"]
    end = job(tmp_path, 3, words, rank_args=other, before=before)
    assert 2 in end.codes and set(end.codes) <= {2, -15}, end.logs
    (line,) = end.errors()
    assert f"rank 1 was started with a different {what}" in line
    assert what != "config" or "zero: 2" in line


@pytest.mark.slow
def test_data_without_a_tokenizer_is_refused_until_it_is_named(tmp_path, args):
    corpus(tmp_path)
    shutil.rmtree(tmp_path / "text.tokenizer")
    meta = tmp_path / "text.json"
    meta.unlink(missing_ok=True)  # as Megatron-LM writes its files: .bin and .idx alone
    words = [*args, "--log.dir", str(tmp_path), "--data.path", str(tmp_path / "text")]
    end = job(tmp_path, 2, [*words, "--model.vocab", "257"])
    (line,) = end.errors()
    assert 2 in end.codes and line.startswith("error: data.tokenizer: ") and "name it: bytes" in line
    end = job(tmp_path, 2, [*words, "--data.tokenizer", "bytes"])
    assert end.codes == [0, 0], end.logs


def test_a_file_that_may_not_grow_is_a_full_disk():
    assert [get_exit_code(OSError(e, "x")) for e in (errno.EFBIG, errno.ENOSPC, errno.ENOENT)] == [82, 82, 1]
