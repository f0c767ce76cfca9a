"""Config: layers and precedence, one-line errors that name the key and the way out, YAML without
surprises.
"""

import pytest

from config import ConfigError
from config.reading import dump, recipes, resolve
from config.reading.schedules import plan_pipeline
from config.reading.suggestions import check_rules
from config.tree import with_values


def refused(*argv, name=None, file=None, match=None):
    with pytest.raises(ConfigError, match=match) as e:
        plan_pipeline(resolve(name, file, list(argv)), 1)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_the_command_line_comes_above_the_file_and_the_file_above_the_recipe(tmp_path):
    f = tmp_path / "a.yaml"
    f.write_text("optim: {lr: 3e-4}\ntrain: {seed: 7}\n")
    cfg = resolve("llama3-tiny", str(f), ["--train.seed", "8", "--optim.beta1=0.8"])
    assert cfg.optim.lr == 3e-4 and cfg.train.seed == 8 and cfg.optim.beta1 == 0.8
    assert cfg.model.mixer.rope.scaling.factor == 8.0 and cfg.model.mixer.kv_heads == 4  # from the preset
    assert cfg.log.name == "llama3-tiny"


@pytest.mark.slow
def test_the_dump_repeats_the_run(tmp_path):
    for name in recipes():
        cfg = resolve(name, None, [])
        f = tmp_path / "config.yaml"
        f.write_text(dump(cfg))
        assert resolve(None, str(f), []) == cfg
        check_rules(with_values(cfg, {"model.vocab": cfg.model.vocab or 500}))


def test_no_recipe_ends_before_its_schedule_does():
    """Under a time limit the machine decides which rates a run sees, and the run ends with code 75."""
    assert resolve(None, None, []).train == resolve("quickstart", None, []).train
    limits = {name: resolve(name, None, []).train.max_minutes for name in recipes()}
    assert {name for name, limit in limits.items() if limit is not None} == set()


def test_a_horizon_replaces_the_one_below():
    cfg = resolve("llama3-tiny", None, ["--train.tokens", "1e6"])
    assert cfg.train.steps is None and cfg.train.tokens == 1e6
    assert "exactly one" in refused("--train.tokens", "1e6", "--train.steps", "3")


@pytest.mark.parametrize("argv,match", [
    (["--parallel.tpp", "2"], r"^parallel\.tpp: no such key; did you mean parallel\.tp\?$"),
    (["--tp", "2"], r"^tp: no such key; did you mean parallel\.tp\?$"),
    (["--optim.lr"], r"^optim\.lr: needs a value"),
    (["--optim.lr", "fast"], r"^optim\.lr: expected a finite number, got 'fast'"),
    (["--optim.lr", "nan"], r"optim\.lr: expected a finite number"),
    (["--train.steps", "2.5"], r"^train\.steps: expected a whole number"),
    (["--train.dtype", "fp12"], r"train\.dtype: 'fp12' is not one of fp64, fp32, bf16"),
    (["--model.mixer.heads", "5"],
     r"^model\.mixer\.heads: 5 does not divide model\.hidden=128.*; try model.mixer.heads .*4"),
    (["--model.mixer.heads", "8", "--model.mixer.kv_heads", "3"],
     r"^model\.mixer\.kv_heads: 3 does not divide model\.mixer\.heads=8; try"),
    (["--train.global_batch", "17"],
     r"^train\.global_batch: 17 is not a multiple .*try train.global_batch .*16"),
    (["--model.mixer.kernel", "triton", "--train.device", "cpu"],
     r"^model\.mixer\.kernel: triton needs a CUDA GPU, and train\.device is cpu; use auto"),
    (["--model.mixer.kernel", "flash", "--train.dtype", "fp32"],
     r"^model\.mixer\.kernel: flash-attn has no fp32; set train\.dtype bf16"),
    (["--model.mixer.kernel", "triton", "--train.dtype", "fp64"],
     r"^model\.mixer\.kernel: the Triton kernels have no fp64"),
    (["--train.micro_batch", "0"], r"^train\.micro_batch: 0 must be above 0"),
    (["--eval.every", "0"], r"^eval\.every: 0 must be above 0, or none$"),
    (["--log.name", "../x"], r"^log\.name: '\.\./x' must be a plain folder name"),
    (["--model.preset", "lama3-8b"], r"^model\.preset: no such preset 'lama3-8b'; did you mean llama3-8b"),
    (["stray"], r"^stray: unexpected"),
    (["--model.positions", "learned", "--model.mixer.rope", "none", "--train.seq_len", "4096"],
     r"^train\.seq_len: 4096 is longer than the 2048 learned positions"),
    (["--optim.min_lr", "1"], r"^optim\.min_lr: 1\.0 must lie in"),
])
def test_a_setting_that_cannot_be_read_is_one_line_with_the_way_out(argv, match):
    refused(*argv, match=match)


def test_unknown_recipe_names_its_neighbours():
    assert "did you mean llama3-tiny" in refused(name="lama3-tiny")


@pytest.mark.parametrize("text,match", [
    ("a: &x [1]\nb: *x\n", r":2: aliases are not allowed"),
    ("train: {seed: 1, seed: 2}\n", r":1: seed is given twice"),
    ("train: {seed: !!python/object/apply:os.getcwd []}\n", r":1: not YAML"),
    ("train: [1\n", r"not YAML"),
    ("- 1\n", r"expected keys and values"),
    ("train: {steps: 12:30:45}\n", r"train\.steps"),
    ("optim: {lr: .nan}\n", r"optim\.lr: expected a finite number"),
    # what PyYAML, Python or the presets would answer with a traceback
    ("model: 5\n", r"^model: expected"),
    ("log: 5\n", r"^log: expected"),
    ("train: 5\n", r"^train: expected"),
    ("model: {preset: [1]}\n", r"no such preset \[1\]"),
    ("model: {preset: {a: 1}}\n", r"no such preset"),
    ("log: {}\n? [a]\n: 1\n", r":2: a key must be one word"),
    ("? {a: 1}\n: 1\n", r":1: a key must be one word"),
    ("train: {steps: " + "9" * 5000 + "}\n", r":1: this value is not a valid int"),
    ("log: {}\ntrain: {steps: !!int abc}\n", r":2: this value is not a valid int"),
    ('train: {steps: !!int ""}\n', r":1: this value is not a valid int"),
    ("optim: {lr: !!float abc}\n", r":1: this value is not a valid float"),
    ("train: {compile: !!bool x}\n", r":1: this value is not a valid bool"),
    ("train: {steps: !!timestamp x}\n", r":1: this value is not a valid timestamp"),
    ("train: {steps: !!timestamp 2020-99-99}\n", r":1: this value is not a valid timestamp"),
    ("!!map [1]\n", r":1: "),
    ("[" * 3000, r"nested too deep"),
    ("{a: " * 3000, r"nested too deep"),
])
def test_a_file_that_cannot_be_read_is_one_line_with_its_place(tmp_path, text, match):
    f = tmp_path / "c.yaml"
    f.write_text(text)
    refused(file=str(f), match=match)


def test_off_and_no_are_words_of_yaml_and_yes_is_true(tmp_path):
    f = tmp_path / "c.yaml"
    f.write_text(
        "log: {wandb: off, name: no}\ndata: {doc_mask: yes}\ntrain: {deterministic: false, tokens: 1e9}\n"
    )
    cfg = resolve(None, str(f), [])
    assert (cfg.log.wandb, cfg.log.name, cfg.data.doc_mask) == ("off", "no", True)
    assert (cfg.train.deterministic, cfg.train.tokens) == (False, 1e9)


def test_missing_and_binary_files_are_refused_by_name(tmp_path):
    refused(file=str(tmp_path / "no.yaml"), match="No such file")
    f = tmp_path / "b.yaml"
    f.write_bytes(b"\xff\xfe\x00")
    refused(file=str(f), match="b.yaml")
