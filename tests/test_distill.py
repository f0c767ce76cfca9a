"""Distillation from a teacher while training (distill.teacher), beside transformers' models of both and the
formula of arXiv 1503.02531 by hand.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from in_fp64 import InFp64
from program import Enough, trained
from ranks import corpus
from test_continued import load_theirs, same_values, values_of

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from checkpoint.disk import store  # noqa: E402
from checkpoint.trained import load_run  # noqa: E402
from config import ConfigError  # noqa: E402
from config.reading import resolve, split_argv  # noqa: E402
from parallel.wire.world import World  # noqa: E402
from runtime.lines import read_metrics  # noqa: E402

STEPS, LR, CLIP = 4, 0.02, 0.5
MODEL = (
    "llama3-tiny --model.layers 2 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 "
    "--model.mlp.width 48 --model.context 64 --model.tied false --model.norm.eps 1e-6 "
    "--model.mixer.rope.base 10000 --model.mixer.rope.scaling none"
).split()
RUN = (
    "--model.vocab 257 --data.tokenizer bytes --data.pack best_fit --train.dtype fp64 --train.seq_len 48 "
    "--train.micro_batch 2 --train.global_batch 4 "
    f"--train.threads 1 --train.steps {STEPS} --optim.lr {LR} --optim.weight_decay 0 --optim.clip {CLIP} "
    "--optim.warmup 0 --optim.decay constant --eval.batches 1 --eval.sample 0 --log.every 1"
).split()
SHARE, TEMPERATURE = 0.7, 2.5
MIX = ("--distill.weight", str(SHARE), "--distill.temperature", str(TEMPERATURE))


def make_llama(folder, seed, **sizes):
    torch.manual_seed(seed)
    config = LlamaConfig(
        **dict(vocab_size=257, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
               initializer_range=0.1, bos_token_id=None, eos_token_id=256, tie_word_embeddings=False,
               dtype="float64") | sizes
    )
    LlamaForCausalLM(config).double().save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """student/, teacher/: Llamas in fp64, the teacher deeper and wider; text: the data."""
    home = tmp_path_factory.mktemp("distilled")
    corpus(home)
    make_llama(home / "student", 5, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    make_llama(home / "teacher", 6, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
               tie_word_embeddings=True)
    return home


def train_ours(home, name, *more, last=None, model=None):
    """batches, loss, norm: of each step; valid: {step: the validation loss}; run: the run. last: the step
    after which it dies. model: words of another model than the student's."""
    seen = SimpleNamespace(batches={}, loss=[], norm=[], valid={}, run=None)

    def watch(point, step=None, **what):
        if point == "run.built":
            seen.run = what["run"]
        elif point == "step.read":
            seen.batches[step] = what["batches"]
        elif point == "eval.end":
            seen.valid[step] = float(what["loss"])
        elif point == "step.end":
            seen.loss.append(float(what["loss"]))
            seen.norm.append(float(what["norm"]))
            if step == last:
                seen.run.data.close()
                raise Enough

    start = () if model else ("--checkpoint.init_from", str(home / "student"))
    argv = [*(model or MODEL), *RUN, "--data.path", str(home / "text"), "--log.dir", str(home / "runs"),
            "--log.name", name, *start, *more]
    assert trained(World(), resolve(*split_argv(argv)), str(home / "runs" / name), watch) == 0
    return seen


def logits_of_llama(folder):
    """tokens -> logits of a Hugging Face folder."""
    model = load_theirs(folder)

    def logits(tokens):
        with InFp64(), torch.no_grad():
            return model(tokens).logits

    return logits


def train_theirs(home, batches, teacher_logits, share, temperature):
    """(losses, norms) of the steps by torch.optim.AdamW, and their (cross entropy, divergence)."""
    model = load_theirs(home / "student")
    optim = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms, terms, uncounted = [], [], [], 0
    for step in sorted(batches):
        tokens = torch.cat([batch.tokens for batch in batches[step]])
        targets = torch.cat([batch.targets for batch in batches[step]])
        counted = targets != -100
        uncounted += int((~counted).sum())
        with InFp64():
            logits = model(tokens).logits[counted]
        p = (teacher_logits(tokens)[counted] / temperature).softmax(-1)
        q = (logits / temperature).softmax(-1)
        divergence = (p * (p / q).log()).sum(-1).mean()
        of_targets = -logits.softmax(-1)[range(len(logits)), targets[counted]].log().mean()
        loss = (1 - share) * of_targets + share * temperature**2 * divergence
        optim.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optim.step()
        losses.append(loss.item())
        terms.append((of_targets.item(), divergence.item()))
    assert uncounted > 0
    return (losses, norms), terms


def logged_terms(home, name):
    """The cross entropy and the divergence of each step in metrics.jsonl."""
    steps, _ = read_metrics(home / "runs" / name)
    return [(row["ce"], row["kl"]) for row in steps]


def same_terms(got, want):
    assert len(got) == len(want) == STEPS
    for ours, theirs in zip(got, want):
        assert ours == pytest.approx(theirs, rel=1e-9)


def teacher_of(run):
    return run.stages[0].head.teacher


@pytest.mark.parametrize("share, temperature", [(SHARE, TEMPERATURE), (1.0, 1.0)])
def test_steps_are_those_of_the_formula_beside_transformers(home, share, temperature):
    mix = ("--distill.weight", str(share), "--distill.temperature", str(temperature))
    ours = train_ours(home, f"hf-{share}", "--distill.teacher", str(home / "teacher"), *mix)
    logits = logits_of_llama(home / "teacher")
    steps, terms = train_theirs(home, ours.batches, logits, share, temperature)
    same_values(ours, steps)
    same_terms(logged_terms(home, f"hf-{share}"), terms)
    assert ours.loss[-1] < ours.loss[0]


TEACHERS = {  # runs of ours
    "experts": "deepseek-v3-tiny --model.layers 2 --model.hidden 32 --model.vocab_multiple 32",
    "capped": "gemma2-tiny --model.layers 2 --model.hidden 32",
}


@pytest.mark.parametrize("name, words", TEACHERS.items(), ids=TEACHERS)
def test_a_run_of_ours_teaches_with_its_logits(home, name, words):
    """Experts with biases and multi-token prediction; bounded logits and a scaled, tied embedding."""
    train_ours(home, name, model=words.split())
    run = str(home / "runs" / name)
    ours = train_ours(home, f"of-{name}", "--distill.teacher", run, *MIX)
    stage = load_run(run, torch.device("cpu"), "fp64").stage

    def logits(tokens):
        with torch.no_grad():
            return stage.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))

    steps, terms = train_theirs(home, ours.batches, logits, SHARE, TEMPERATURE)
    same_values(ours, steps)
    same_terms(logged_terms(home, f"of-{name}"), terms)


def test_the_teacher_stays_as_it_is_and_out_of_checkpoints(home):
    ours = train_ours(home, "apart", "--distill.teacher", str(home / "teacher"), *MIX)
    theirs = load_theirs(home / "teacher")
    table = teacher_of(ours.run).stage.embedding.weight
    assert torch.equal(table[:257], theirs.model.embed_tokens.weight)
    params = list(teacher_of(ours.run).stage.parameters())
    assert not any(p.requires_grad or p.main_grad is not None for p in params)
    own = [p for stage in ours.run.stages.values() for p in stage.parameters()]
    assert params and not set(map(id, params)) & set(map(id, own))

    plain = train_ours(home, "plain")
    assert plain.run.stages[0].head.teacher is None
    stored = []
    for name in ("apart", "plain"):
        path = store.checkpoint_folder(home / "runs" / name / "checkpoints", STEPS)
        stored.append(sorted({(p.box.key, p.box.shape) for p in store.quick_check(path).pieces}))
    assert stored[0] == stored[1]
    assert sum(b.size for b in ours.run.buckets) == sum(b.size for b in plain.run.buckets)
    # validation is the cross entropy alone
    assert ours.valid[0] == plain.valid[0] and ours.valid[STEPS] != plain.valid[STEPS]
    assert ours.loss[0] != plain.loss[0]
    steps, evaluations = read_metrics(home / "runs" / "plain")
    assert steps and not any({"ce", "kl"} & row.keys() for row in (*steps, *evaluations))


def test_a_run_resumes_bit_for_bit(home):
    words = ("--distill.teacher", str(home / "teacher"), "--checkpoint.every", "2", *MIX)
    whole = train_ours(home, "whole", *words)
    with pytest.raises(Enough):
        train_ours(home, "half", *words, last=3)
    again = train_ours(home, "half", *words)
    assert again.loss == whole.loss[2:] and again.norm == whole.norm[2:]


def test_a_finished_run_needs_its_teacher_no_more(home):
    shutil.copytree(home / "teacher", home / "moved")
    words = ("--distill.teacher", str(home / "moved"))
    assert len(train_ours(home, "finished", *words).loss) == STEPS
    shutil.rmtree(home / "moved")
    assert not train_ours(home, "finished", *words).loss


def test_each_phase_has_the_teacher(home):
    phases = home / "phases.yaml"
    phases.write_text("- after_steps: 2\n  optim.lr: 0.02\n")
    words = ("--distill.teacher", str(home / "teacher"), *MIX)
    one, two = (train_ours(home, name, *words, *more) for name, more in
                (("one-phase", ()), ("phased", ("--train.phases", str(phases)))))
    assert one.loss == two.loss


def with_tokenizer(home):
    """The teacher's folder with another tokenizer of 257 ids."""
    folder = home / "other-tokens"
    load_theirs(home / "teacher").save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("layout", [
    "tp 2, sp true, zero 3",
    pytest.param("pp 2, cp 2, zero 1", marks=pytest.mark.slow),
    pytest.param("tp 4, recompute full", marks=pytest.mark.slow),
    pytest.param("zero 2, pp 2, schedule zb-v, vpp none", marks=pytest.mark.slow),
])
def test_layouts_train_as_one_process(home, ranks, layout):
    """With padding in the vocabulary of the last tp rank, and targets that do not count."""
    name = layout.replace(" ", "").replace(",", "-")
    words = [f"--parallel.{word.replace(' ', '=')}" for word in layout.split(", ")]
    argv = [*MODEL, *RUN, "--model.layers", "4", "--train.micro_batch", "1"]
    argv += ["--data.path", str(home / "text"), "--log.dir", str(home / "runs")]
    argv += ["--distill.teacher", str(home / "teacher"), *MIX, "--log.name"]
    alone = values_of(World(), [*argv, f"alone-{name}"], str(home / "runs" / f"alone-{name}"))
    for seen in ranks(4).run(values_of, [*argv, name, *words], str(home / "runs" / name)):
        assert seen == pytest.approx(alone, rel=1e-9)
    same_terms(logged_terms(home, name), logged_terms(home, f"alone-{name}"))


@pytest.mark.parametrize("zero", [1, 3])
def test_steps_beside_a_teacher_repeat_bit_for_bit(home, ranks, zero):
    """From the first step on, whose teacher has just been read."""
    argv = [*MODEL, *RUN, "--data.path", str(home / "text"), "--log.dir", str(home / "runs")]
    argv += ["--distill.teacher", str(home / "teacher"), *MIX, "--train.rerun_every", "1"]
    argv += ["--train.micro_batch", "1", "--parallel.zero", str(zero), "--log.name", f"again-{zero}"]
    for seen in ranks(2).run(values_of, argv, str(home / "runs" / f"again-{zero}")):
        assert len(seen) == 2 * STEPS


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_low_precision_follows_fp64(home, dtype):
    """The teacher is in 16 bits beside a model in fp8."""
    words = ("--distill.teacher", str(home / "teacher"), *MIX)
    exact = train_ours(home, f"beside-{dtype}", *words)
    low = ("--train.dtype", dtype, *(("--train.fp8_keep", "0") if dtype == "fp8" else ()))
    ours = train_ours(home, f"in-{dtype}", *words, *low)
    kinds = {p.dtype for p in teacher_of(ours.run).stage.parameters()}
    assert kinds == {torch.float16 if dtype == "fp16" else torch.bfloat16}
    assert ours.loss == pytest.approx(exact.loss, rel=0.02)


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)


def test_what_cannot_teach_is_refused_in_one_line(home):
    make_llama(home / "more-ids", 7, vocab_size=300, **SMALL)
    make_llama(home / "fewer-ids", 7, vocab_size=200, **SMALL | {"eos_token_id": 1})
    refused = {
        home / "nowhere": "is neither a run, nor a checkpoint, nor a Hugging Face folder",
        home / "more-ids": "has 300 token ids, and model.vocab is 257; .* set --model.vocab 300",
        home / "fewer-ids": "has 200 token ids, .* choose a teacher with the same tokenizer",
        with_tokenizer(home): "data.tokenizer .* there and .* here; prepare the data with --tokenizer",
    }
    for where, why in refused.items():
        with pytest.raises(ConfigError, match=f"^distill.teacher: .*{why}") as error:
            train_ours(home, "refused", "--distill.teacher", str(where))
        assert "\n" not in str(error.value) and "init_changes" not in str(error.value)

    words = ("--distill.teacher", str(home / "teacher"), "--train.dtype", "fp32")
    with pytest.raises(ConfigError, match="^train.cuda_graphs: not possible with .*distill.teacher"):
        train_ours(home, "refused", *words, "--train.cuda_graphs", "true", "--train.device", "cuda")


def refusal(world, argv, folder):
    with pytest.raises(ConfigError) as error:
        trained(world, resolve(*split_argv(argv)), folder, lambda *_, **__: None)
    return str(error.value)


def test_a_teacher_that_the_layout_does_not_divide_is_refused(home, ranks):
    make_llama(home / "odd", 7, **SMALL | {"intermediate_size": 51})
    argv = [*MODEL, *RUN, "--data.path", str(home / "text"), "--log.dir", str(home / "runs"), "--log.name",
            "odd", "--parallel.tp", "2", "--distill.teacher", str(home / "odd")]
    for why in ranks(2).run(refusal, argv, str(home / "runs" / "odd")):
        assert why.startswith("distill.teacher: ")
        assert why.endswith("under the layout of the run: parallel.tp: 2 does not divide model.mlp.width=51")
