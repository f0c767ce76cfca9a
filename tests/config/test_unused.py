"""Keys that do nothing in a config: each row of unused.TABLE refuses or notes its keys, lets them pass where
they count, and is right: with all of them set a run writes the same bytes.
"""

import shlex
import typing

import pytest
import run_folder
from ranks import MODEL, corpus, job
from safetensors.torch import load_file

import config
import train
from config import Config, ConfigError
from config.reading import recipes, resolve, rules, split_argv, unused
from config.reading.kinds import every_path
from config.reading.schedules import plan_pipeline
from config.schema import OptimConfig
from config.tree import has_path, is_below, value_at
from data.blend import parse_blend

OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
# of each row of unused.TABLE, found by its keys: a value of each; settings with which they do nothing;
# settings with which they do something, and on how many ranks
CASES = (
    ({"context": 128}, "--train.seq_len 256", "--train.seq_len 128", 1),
    ({"mixer.kernel": "sdpa"}, "--parallel.cp 2", "--parallel.cp 2 --parallel.cp_kind ulysses", 2),
    ({"fp8_keep": 0, "fp8_block": 64}, "--train.dtype bf16", "--train.dtype fp8 --train.fp8 blockwise", 1),
    ({"fp8_block": 64}, "--train.dtype fp8", "--train.dtype fp8 --train.fp8 blockwise", 1),
    ({"unproven": "true"}, "--train.device cpu", "", 1),
    ({"loss_scale": 1024.0, "loss_scale_window": 100}, "--train.dtype bf16", "--train.dtype fp16", 1),
    ({"min_lr": 1e-5}, "--optim.decay constant", "--optim.decay linear", 1),
    ({"decay_fraction": 0.5}, "--optim.decay linear", "--optim.decay wsd", 1),
    ({"base_batch": 2}, "", "--optim.lr_rule sqrt", 1),
    ({"spike_window": 4}, "", "--optim.spike_sigma 1e-3", 1),
    ({"spike_rewinds": 1}, "--optim.spike_sigma 1e9", "--optim.spike_sigma 1e9 --optim.spike_rewind 9", 1),
    ({"momentum": 0.5}, "--optim.name lion", "--optim.name lars", 1),
    ({"orthogonalize": "polar-express"}, "--optim.name lars", "--optim.name normuon", 1),
    ({"rank_fraction": 0.5}, "--optim.name muon", "--optim.name dion", 1),
    ({"beta1": 0.5}, "--optim.name lars", "--optim.name lion", 1),
    ({"beta2": 0.5}, "--optim.name lars", "--optim.name lion", 1),
    ({"eps": 1e-4}, "--optim.name lion", "--optim.name muon", 1),
    ({"sp": "true", "async_tp": "true"}, "", "--parallel.tp 2", 2),
    ({"ep_chunks": 2}, "--model.mlp experts", "--model.mlp experts --parallel.ep 2", 2),
    ({"ep_bound": 1.5}, "--model.mlp experts", "--model.mlp experts --parallel.ep 2", 2),
    ({"compress_tokens": "fp8"}, "--model.mlp experts", "--model.mlp experts --parallel.etp 2", 2),
    ({"schedule": "gpipe", "vpp": 3}, "", "--parallel.pp 2", 2),
    ({"cp_kind": "ulysses"}, "", "--parallel.cp 2", 2),
    ({"zero": 1, "reduce": "ring", "compress": "int8", "compress_weights": "int8"}, "--parallel.tp 1", "", 2),
    ({"timeout_s": 20}, "", "", 2),
    ({"check_replicas": 2}, "", "", 2),
    ({"stages": "4"}, "", "--parallel.pp 2", 2),
    ({"recompute": "full"}, "--parallel.recompute_stages none,full --parallel.pp 2", "", 1),
    ({"recompute_parts": "norm"}, "--parallel.recompute full", "--parallel.recompute_stages selective", 1),
    ({"node": 2}, "", "--parallel.reduce hierarchy", 2),
    ({"compress_block": 128}, "--parallel.compress powersgd", "--parallel.compress_weights fp8", 2),
    ({"powersgd_rank": 2}, "--parallel.compress int8", "--parallel.compress powersgd", 2),
    ({"span": 256}, "--data.pack best_fit", "", 1),
    ({"split": "90,10"}, "--data.valid text", "", 1),
    ({"fim_spm_rate": 0.1, "fim_split": "token", "fim_tokens": "a,b,c", "fim_valid": "true"}, "",
     "--data.fim_rate 0.5", 1),
    ({"cache": "elsewhere"}, "--data.path text", "--data.path stdlib", 1),
    ({"mirror_failures": 2}, "", "--checkpoint.mirror s3://bucket/runs", 1),
    ({"init_changes": "model.mixer.window"}, "", "--checkpoint.init_from runs/other", 1),
    ({"replicas": 1, "memory_dir": "/tmp"}, "", "--checkpoint.memory_every 10", 1),
    ({"weight": 0.3, "temperature": 2.0}, "", "--distill.teacher runs/other", 1),
    ({"source_batches": 4}, "--data.path text", "--data.path '0.5 a 0.5 b'", 1),
    ({"prompt": "a", "temperature": 0.5}, "--eval.sample 0", "", 1),
    ({"special": "true"}, "--eval.prompt none", "--eval.prompt a", 1),
    ({"tasks_every": 100, "tasks_limit": 7}, "", "--eval.tasks configs/tasks", 1),
    ({"project": "mine", "group": "g", "tags": "a,b", "notes": "n"}, "", "--log.mlflow runs/mlflow", 1),
    ({"entity": "us"}, "", "--log.wandb offline", 1),
    ({"slow_window": 20}, "", "", 2),
    ({"noise_scale": "true"}, "--train.global_batch 8", "--train.global_batch 16", 1),
)
# keys that every run reads, whatever the other keys are
READ = {
    "model": "preset layers hidden vocab vocab_multiple blocks pattern residual residual_scale positions "
    "embed_scale embed_norm logit_scale logit_cap tied dropout init_std",
    "train": "steps tokens flops seq_len micro_batch global_batch ramp phases seed dtype ema max_minutes "
    "deterministic rerun_every rerun_suspects compile cuda_graphs device threads",
    "optim": "name lr warmup decay decay_steps weight_decay groups clip qk_clip spike_sigma",
    "parallel": "tp pp cp bucket_mb offload recompute_stages elastic auto",
    "data": "path tokenizer eod bos dtype valid doc_mask pack fim_rate prefetch",
    "distill": "teacher",
    "eval": "every batches sample tasks",
    "checkpoint": "every keep keep_every keep_at keep_minutes resume init_from branch "
    "failed_saves mirror memory_every async_save timeout_s",
    "log": "dir name every inside_every wandb tensorboard mlflow comet alert_command",
    "profile": "steps memory",
}
# of the keys that config/reading/rules.py or build.py refuses where they do nothing, for any world size and
# in every program: settings with which they do
RULED = {
    "train.fp8": "rowwise", "optim.spike_rewind": "2", "optim.lr_rule": "linear",
    "optim.states": "bf16 --optim.name lion",
    "parallel.ep": "2", "parallel.etp": "2", "parallel.dp_rep": "2",
    "log.routing_every": "1", "train.replay_routing": "runs/a",
}


# parts: every key of one is read where the part is, but for those of a row
PARTS = ("model.mixer", "model.mlp", "model.norm", "model.mtp", "model.mup", "model.lora")


def resolved(words: str, section: str = "", **keys) -> Config:
    argv = [f"--{section}.{key}={value}" for key, value in keys.items()]
    return resolve("llama2-tiny", None, [*shlex.split(words), *argv])


def test_every_key_has_a_row_or_is_always_read():
    table = {f"{row.section}.{key}" for row in unused.TABLE for key in row.keys.split()}
    read = [f"{section}.{key}" for section, keys in READ.items() for key in keys.split()]
    named = [*table, *read, *RULED]
    every = [path for path in every_path(Config) if path in table or not is_below(path, PARTS)]
    missing = sorted(set(every) - set(named))
    assert not missing, (
        f"when has {missing} no effect? never: add it to READ in this file; else: a row of "
        "config/reading/unused.py"
    )
    assert sorted(named) == sorted(every)  # each in one of the three, and no other


def case_of(row: unused.UnusedKeys) -> tuple:
    found = [case for case in CASES if set(case[0]) == set(row.keys.split())]
    assert len(found) == 1, f"add a case for the row of {row.section}.{row.keys} to CASES in this file"
    return found[0]


def test_every_case_is_of_one_row():
    assert sorted(map(id, map(case_of, unused.TABLE))) == sorted(map(id, CASES))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "row",
    unused.TABLE,
    ids=[f"{row.section}.{row.keys.split()[0]}" for row in unused.TABLE],
)
def test_each_row_refuses_or_notes_its_keys_and_lets_them_pass_where_they_count(row):
    values, idle, live, world = case_of(row)
    line = unused.check_unused(resolved(live), 2)
    assert line == "" or "parallel" in line
    for key, value in values.items():
        path = f"{row.section}.{key}"
        cfg = resolved(idle, row.section, **{key: value})
        assert [(found, why) for found, _, why in unused.find_unused(cfg, 1) if found == path] == [
            (path, row)
        ]
        if row.note:
            line = unused.check_unused(cfg)
            assert line.startswith("note: ") and path in line and row.why in line and "\n" not in line
        else:
            with pytest.raises(ConfigError) as refused:
                unused.check_unused(cfg)
            line = str(refused.value)
            assert path in line and row.remedy in line and "\n" not in line
        used = resolved(live, row.section, **{key: value})
        assert path not in [found for found, *_ in unused.find_unused(used, world)]


@pytest.mark.parametrize("path", RULED)
def test_the_rules_refuse_the_rest(path):
    cfg = resolved(f"--{path} {RULED[path]} --model.vocab 500")
    with pytest.raises(ConfigError, match=path.split(".")[1]):
        plan_pipeline(cfg, 2)


@pytest.mark.parametrize("name", recipes())
def test_no_recipe_sets_what_does_nothing(name):
    assert unused.check_unused(resolve(name, None, [])) == ""


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    data = corpus(tmp_path_factory.mktemp("unused"))
    return [*MODEL, "--data.path", data, "--train.steps", "2", "--log.name", "r", "--checkpoint.keep", "1"]


def test_train_refuses_before_it_makes_anything_and_notes_in_one_line(tmp_path, args, capsys):
    base = ["llama2-tiny", *args, "--log.dir", str(tmp_path)]
    end = job(tmp_path / "home", 2, [*base, "--optim.momentum", "0.5"])
    (line,) = end.errors()
    assert line.startswith("error: optim.momentum: 0.5 does nothing: ") and 2 in end.codes
    assert not (tmp_path / "r").exists()
    assert train.main([*base, "--parallel.sp", "true", "--parallel.zero", "1"]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert "parallel.sp true" in note and "parallel.zero 1" in note


@pytest.mark.parametrize("words, stays, follow", [
    ("--model.hidden 256", "model.mixer.heads 8, model.mixer.kv_heads 4, model.mlp.width 384, optim.lr 0.002",
     "--model.mixer.heads 16 --model.mixer.kv_heads 8 --model.mlp.width 768 --model.mup.base 128"),
    ("--model.hidden 256 --model.mlp.width 512 --optim.lr 1e-3",
     "model.mixer.heads 8, model.mixer.kv_heads 4", "--model.mixer.heads 16 --model.mixer.kv_heads 8"),
    ("--model.hidden 256 --model.mixer.heads 12 --model.mup.base 128",
     "model.mixer.kv_heads 4, model.mlp.width 384",
     "--model.mixer.kv_heads 6 --model.mixer.head_dim 16 --model.mlp.width 768"),
    ("--model.hidden 100 --optim.name lamb",
     "model.mixer.heads 8, model.mixer.kv_heads 4, model.mlp.width 384, optim.lr 0.002",
     "--model.mixer.heads 6 --model.mixer.kv_heads 3 --model.mixer.head_dim 16 --model.mlp.width 304"),
    ("--model.hidden 256 --model.mlp.width 768 --model.mixer.heads 16 --model.mixer.kv_heads 8", None, None),
    ("--model.hidden 128", None, None),
    ("--model.layers 8", None, None),
])
def test_what_does_not_follow_another_width_is_named(words, stays, follow):
    """Nothing is changed but what is typed."""
    name, file, argv = split_argv(["llama3-tiny", *words.split()])
    note = unused.kept_sizes(resolve(name, file, argv), argv)
    told = f"of llama3-tiny, whose sizes stay: {stays}; to keep its proportions, add  {follow}"
    assert note.endswith(told) if stays else note == ""


SIZES = ("mixer.heads", "mixer.kv_heads", "mixer.kv_rank", "mlp.width", "moe_ffn")


@pytest.mark.parametrize("name", recipes())
def test_what_is_to_be_added_keeps_the_proportions(name):
    base = resolve(name, None, []).model
    for share in (2, 1 / 2, 17 / 16):
        argv = ["--model.hidden", str(int(share * base.hidden))]
        argv += unused.kept_sizes(resolve(name, None, argv), argv).partition(", add  ")[2].split()
        cfg = resolve(name, None, argv)
        assert unused.kept_sizes(cfg, argv) == "" and rules.validate(cfg) is None
        assert config.head_dim(cfg.model) == config.head_dim(base)
        for key in SIZES if share == 2 else ():
            if has_path(base, key):
                assert (value_at(cfg.model, key) or 0) == 2 * (value_at(base, key) or 0)


def kept(folder) -> tuple[list, list[tuple[str, bytes]]]:
    """Losses and norms of a run, bit for bit, and every tensor of its checkpoint."""
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    rows = [{k: row.get(k) for k in keys} for row in run_folder.rows(folder / "r")]
    (saved,) = (folder / "r" / "checkpoints").glob("step_*/*.safetensors")
    return rows, sorted((name, value.numpy().tobytes()) for name, value in load_file(saved).items())


WHOLE = (
    # (recipe, what it is, every key that then does nothing)
    (
        "llama2-tiny",
        "--optim.decay linear",
        {
            "train.fp8_keep": 0, "train.fp8_block": 64, "optim.decay_fraction": 0.5, "optim.momentum": 0.5,
            "parallel.sp": "true", "parallel.schedule": "zb-h1", "parallel.cp_kind": "ulysses",
            "parallel.zero": 1, "parallel.reduce": "ring", "parallel.timeout_s": 20, "parallel.stages": "2",
            "parallel.recompute_parts": "norm", "parallel.node": 2, "parallel.compress_block": 128,
            "parallel.powersgd_rank": 2, "data.cache": "elsewhere", "eval.prompt": "a",
            "eval.temperature": 0.5, "eval.tasks_every": 100, "eval.tasks_limit": 7, "log.project": "mine",
        },
    ),
    (
        "gpt2-tiny",
        "--optim.decay constant --optim.name sgd --parallel.recompute_stages selective",
        {
            "optim.min_lr": 1e-5, "optim.beta1": 0.5, "optim.beta2": 0.5, "optim.eps": 1e-4,
            "parallel.zero": 1, "parallel.compress": "int8", "parallel.compress_weights": "int8",
            "parallel.recompute": "full",
        },
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name, words, idle", WHOLE, ids=[case[0] for case in WHOLE])
def test_what_the_table_calls_idle_changes_no_bit(tmp_path, args, monkeypatch, name, words, idle):
    monkeypatch.setattr(unused, "check_unused", lambda cfg, world: "")
    base = [name, *args, *words.split()]
    more = [f"--{key}={value}" for key, value in idle.items()]
    called = {path for path, *_ in unused.find_unused(resolve(name, None, [*base[1:], *more]), 1)}
    assert called == set(idle)
    for folder, extra in (("plain", []), ("idle", more)):
        assert train.main([*base, *extra, "--log.dir", str(tmp_path / folder)]) == 0
    plain, other = kept(tmp_path / "plain"), kept(tmp_path / "idle")
    assert len(plain[0]) >= 4 and plain[1]
    assert plain[0] == other[0]
    assert [name for (name, was), (_, now) in zip(plain[1], other[1], strict=True) if was != now] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_reads_what_the_table_says(tmp_path, args, monkeypatch, name):
    """Another value of a key changes the weights of three steps, unless the table calls it idle."""
    monkeypatch.setattr(unused, "check_unused", lambda cfg, world: "")
    base = ["llama2-tiny", *args, "--optim.name", name, "--train.steps", "3", "--eval.batches", "1"]

    def weights(folder: str, *more: str) -> list[tuple[str, bytes]]:
        assert train.main([*base, *more, "--log.dir", str(tmp_path / folder)]) == 0
        return kept(tmp_path / folder)[1]

    plain = weights("plain")
    some_read = {key for spec in config.OPTIMIZERS.values() for key in spec.keys}
    for key in sorted({*some_read, "min_lr"}):
        others = {"eps": 1e-2, "min_lr": 1e-4, "orthogonalize": "polar-express"}
        value = others.get(key, 0.5)
        words = [f"--optim.{key}", str(value)]
        cfg = resolve("llama2-tiny", None, [*base[1:], *words])
        idle = any(path == f"optim.{key}" for path, *_ in unused.find_unused(cfg, 1))
        same = weights(key, *words) == plain
        assert same == idle, f"optim.{key} of {name}"


@pytest.mark.parametrize("path, sources", [
    *((blend, 2) for blend in ("0.5 a 0.5 b", "1/3 a 2/3 b", "3e-1 a 7e-1 b", "1 'my a' 2 b")),
    *((path, 1) for path in ("stdlib", "a folder of text", "1 'my text'", "0.5 a")),
])
def test_a_blend_alone_has_sources_to_validate_one_by_one(path, sources):
    assert len(parse_blend(path)[1]) == sources
    line = unused.check_unused(resolved(f"--data.path {shlex.quote(path)} --eval.source_batches 4"))
    assert ("eval.source_batches 4" in line) == (sources == 1) and bool(line) == (sources == 1)
