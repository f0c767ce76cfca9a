"""data/prompts.py: from a folder of a tokenizer to a run, its greedy texts and its scores, beside
transformers on the exported folder, for the tokenizers that families have.
"""

import importlib.util
import io
import json
import math
import re
import shutil

import pytest
import sentencepiece
import tokenizers
import torch
from prepared_data import prepare_rows, write_jsonl
from ranks import MODEL
from tokenizer_families import FAMILIES, make_tokenizer

import train
from config import ConfigError
from data.prompts import match_any, open_prompts, start_token
from data.tokenizer import continuation, load_tokenizer, train_bpe
from scripts import convert, evaluate, generate

CORE = ["llama2", "llama3", "qwen3", "deepseek"]
TEXT = "the cat sat on the mat, and the rat sat"
SPELLED = "say {} and {} it"
NEW = 12
# the system message is not one that all templates take
HAS_SYSTEM = ("llama3", "qwen2", "qwen3", "deepseek", "phi3", "smollm", "olmo")


def told(capsys, main, *words):
    """The JSON that a script prints."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def trained(home, tokenizer, capsys, *more):
    """A run on prepared text whose weights are large, so that each token of a prompt changes the text."""
    rows = [{"text": f"{TEXT} {number} {TEXT}"} for number in range(60)]
    assert prepare_rows(rows, tokenizer, home / "data") == 0
    settings = ["--data.path", home / "data", "--log.dir", home, "--log.name", "run", "--train.steps", 1]
    settings += ["--train.dtype", "fp32", "--optim.lr", 1e-6, "--model.init_std", 0.3, *more]
    assert train.main(["llama3-tiny", *MODEL, *map(str, settings)]) == 0
    return home / "run"


def their_ids(model, ids, stops):
    """The ids that transformers writes greedily after these."""
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW, eos_token_id=stops,
        pad_token_id=0,
    )
    return made[0, len(ids):].tolist()


def their_continuation(tokenizer, model, ids, stops):
    """The end of a text as transformers' pipeline cuts it: the text of all ids without that of the prompt."""
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode([*ids, *their_ids(model, ids, stops)], skip_special_tokens=True)[len(before):]


def their_answer(tokenizer, model, ids, stops):
    """The text of the new ids alone, as in the examples of transformers for chats."""
    return tokenizer.decode(their_ids(model, ids, stops), skip_special_tokens=True)


def their_score(tokenizer, model, before, after):
    """lm-eval's log-likelihood of a continuation (api/model.py, _encode_pair) with transformers' logits."""
    spaces = len(before) - len(before.rstrip())
    if spaces:
        before, after = before[:-spaces], before[-spaces:] + after
    whole, context = tokenizer(before + after).input_ids, tokenizer(before).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[place - 1, whole[place]]) for place in range(len(context), len(whole)))


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_scores_are_those_of_transformers(transformers, tmp_path, capsys, name):
    family = FAMILIES[name]
    run = trained(tmp_path, make_tokenizer(name, tmp_path / "tok"), capsys)
    header = capsys.readouterr().out
    begins = f"documents begin with {family.bos!r}" if family.puts_start else "documents end with"
    assert begins in " ".join(header.split())
    assert convert.main(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    stops = sorted(theirs.convert_tokens_to_ids(text) for text in {family.eos, *family.stops})

    # a text that is continued
    greedy = ["--max-new-tokens", NEW, "--temperature", 0]
    prompt = theirs(TEXT).input_ids
    assert (prompt[0] == theirs.bos_token_id) == family.puts_start
    found = told(capsys, generate.main, run, "--prompt", TEXT, *greedy)
    assert found["prompt_tokens"] == len(prompt)
    assert found["text"] == TEXT + their_continuation(theirs, model, prompt, stops)
    assert their_ids(model, prompt[1:], stops) != their_ids(model, prompt, stops)

    # a text with marks, read as marks
    marked = f"{TEXT}{family.eos}{TEXT}"
    found = told(capsys, generate.main, run, "--prompt", marked, "--special", *greedy)
    assert found["prompt_tokens"] == len(theirs(marked).input_ids)
    assert found["text"] == marked + their_continuation(theirs, model, theirs(marked).input_ids, stops)

    # scores
    example = {"query": f"{TEXT} on the ", "choices": ["mat", "rat sat", "hat"], "gold": 0}
    (tmp_path / "task.jsonl").write_text(json.dumps(example) + "\n")
    report = told(capsys, evaluate.main, run, "--tasks", tmp_path / "task.jsonl")
    score = their_score(theirs, model, example["query"], "mat")
    assert report["tasks"]["task"]["bpb"] == pytest.approx(-score / math.log(2) / 3, abs=1e-4)

    # a chat
    if family.template is None:
        return
    messages = [{"role": "system", "content": "be brief"}] if name in HAS_SYSTEM else []
    words = ["--system", "be brief"] if messages else []
    for turn in ("the cat", "sat on the mat"):
        messages.append({"role": "user", "content": turn})
        words += ["--chat", turn]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        found = told(capsys, generate.main, run, *words, *greedy)
        answer = their_answer(theirs, model, ids, stops)
        assert found["prompt_tokens"] == len(ids)
        assert found["text"] == answer
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.template])
def test_control_tokens_that_a_message_spells_are_text(transformers, tmp_path, name):
    """Only the template writes control tokens: the text between them is encoded by itself, as text."""
    home = make_tokenizer(name, tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    spelled = SPELLED.format(FAMILIES[name].special[-1], FAMILIES[name].eos)
    messages = [
        {"role": "user", "content": "QQQ"},
        {"role": "assistant", "content": "the mat"},
        {"role": "user", "content": "QQQ"},
    ]
    written = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    own = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    own.encode_special_tokens = True  # what is special in it is text
    control = "|".join(map(re.escape, (*FAMILIES[name].special, *FAMILIES[name].marks)))
    want = []
    for part in re.split(f"({control})", written):
        if re.fullmatch(control, part):
            want.append(own.token_to_id(part))
        elif part:
            want += own.encode(part.replace("QQQ", spelled), add_special_tokens=False).ids

    for message in messages:
        message["content"] = message["content"].replace("QQQ", spelled)
    prompts = open_prompts(load_tokenizer(home), None)
    assert prompts.chat(messages) == want
    if FAMILIES[name].puts_start:  # the template writes one, and no second is put before it
        assert want.count(theirs.bos_token_id) == written.count(FAMILIES[name].bos)


@pytest.mark.slow(core=["smollm-true"])
@pytest.mark.parametrize(
    "name, wanted", [("llama3", "false"), ("llama2", "false"), ("smollm", "true"), ("phi3", "true")]
)
def test_exports_have_the_start_token_that_a_run_chooses(transformers, tmp_path, capsys, name, wanted):
    """data.bos against what the files say: a folder that transformers reads as the run reads text."""
    run = trained(tmp_path, make_tokenizer(name, tmp_path / "tok"), capsys, "--data.bos", wanted)
    has_start = wanted == "true"
    assert ("documents begin with" in " ".join(capsys.readouterr().out.split())) == has_start
    assert convert.main(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] == has_start
    ids = theirs(TEXT).input_ids
    assert (ids[0] == theirs.bos_token_id) == has_start
    assert ids[has_start:] == theirs(TEXT, add_special_tokens=False).input_ids
    assert told(capsys, generate.main, run, "--prompt", TEXT)["prompt_tokens"] == len(ids)


def test_our_own_tokenizer_is_exported_with_its_start_token(transformers, tmp_path, capsys):
    run = trained(tmp_path, "bpe-300", capsys, "--data.bos", "true")
    assert "documents begin with '<s>' (id 1), as data.bos says" in " ".join(capsys.readouterr().out.split())
    assert convert.main(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    assert "no tokenizer.json is written" not in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = load_tokenizer(run / "tokenizer")
    assert theirs(TEXT).input_ids == [1, *own.encode(TEXT)]
    for name, wanted, problem in (
        ("bytes", "true", "names no start token; leave data.bos out, or prepare"),
        ("qwen2", "true", "names no start token; name it as bos_token in tokenizer_config.json"),
    ):
        tok = name if name == "bytes" else make_tokenizer(name, tmp_path / name)
        with pytest.raises(ConfigError, match=problem):
            start_token(load_tokenizer(tok), wanted == "true")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_that_puts_a_space_in_front_is_exported(transformers, tmp_path, capsys, kind):
    """As Llama's and Mistral's: the greedy text of the exported folder, its start token and its spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "a rat and a cat"]), model_writer=model, vocab_size=300,
        model_type=kind, byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=3,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    run = trained(tmp_path, tmp_path / "tokenizer.model", capsys, "--data.bos", "true")
    capsys.readouterr()
    assert convert.main(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    report = " ".join(capsys.readouterr().out.split())
    if kind == "unigram":
        assert "it is not a BPE model; the run puts '<s>' (id 1) before a text, which this may not" in report
        return

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = theirs(TEXT).input_ids
    own = load_tokenizer(run / "tokenizer")
    assert ids == [1, *own.encode(TEXT)]
    found = told(capsys, generate.main, run, "--prompt", TEXT, "--max-new-tokens", NEW, "--temperature", 0)
    new = their_ids(model, ids, [own.eod])
    assert found["text"] == own.decode([*ids, *new])  # bytes of half a letter are shown otherwise by theirs


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_a_document_begins_with_one_start_token(tmp_path, name):
    """Whether the text spells it as a control token, as text, or not at all."""
    tok = load_tokenizer(make_tokenizer(name, tmp_path / "tok"))
    bos = FAMILIES[name].bos
    begun, bare = open_prompts(tok, True), open_prompts(tok, False)
    start, plain, spelled = begun.start.id, tok.encode(TEXT), tok.encode(bos + TEXT)
    assert bare.start is None and start not in [*plain, *spelled]
    for special in (False, True):
        assert begun.document(TEXT, special) == [start, *plain]
        assert bare.document(TEXT, special) == plain
    assert begun.document(bos + TEXT) == [start, *spelled] and bare.document(bos + TEXT) == spelled
    for prompts in (begun, bare):
        ids = prompts.document(bos + TEXT, special=True)
        assert ids[0] == start and start not in ids[1:] and tok.decode(ids[1:]).strip() == TEXT


def test_of_several_texts_at_a_place_the_longest_is_found():
    texts = ("<a", "<a>", "<a>b", "b")
    for order in (texts, texts[::-1]):
        assert match_any(order).findall("<a><a>b<ab.") == ["<a>", "<a>b", "<a", "b"]
    assert match_any([]).search("<a>") is None


def test_a_text_continues_with_its_space(tmp_path):
    """A tokenizer that drops the space in front of a text (llama2), too; half a letter is left to it."""
    prefixed = load_tokenizer(make_tokenizer("llama2", tmp_path / "tok"))
    for tok in (load_tokenizer("bytes"), train_bpe([TEXT] * 9, 300), prefixed):
        ids = tok.encode(TEXT)
        for cut in range(len(ids)):
            assert tok.decode(ids[:cut]) + continuation(tok, ids[:cut], ids[cut:]) == TEXT
    cuts = [cut for cut in range(1, len(ids)) if tok.decode(ids[:cut]) + tok.decode(ids[cut:]) != TEXT]
    assert cuts  # without it the space would be lost there
    letter = list("é".encode())
    assert continuation(load_tokenizer("bytes"), letter[:1], letter[1:]) == "\ufffd"


def test_a_sentencepiece_model_follows_the_file_beside_it(tmp_path, capsys):
    """tokenizer_config.json stays with the model: in the data, in the run, in prompts."""
    (tmp_path / "tok").mkdir()
    train_bpe([TEXT * 20], 300, tmp_path / "tok" / "tokenizer.model")
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    run = trained(tmp_path, tmp_path / "tok", capsys)
    shutil.rmtree(tmp_path / "tok")
    plain = load_tokenizer(run / "tokenizer").encode(TEXT)
    assert told(capsys, generate.main, run, "--prompt", TEXT)["prompt_tokens"] == 1 + len(plain)
    with pytest.raises(ConfigError, match="--special: text spells no control token"):
        generate.main([str(run), "--prompt", TEXT, "--special"])


def test_several_tokens_before_a_text_are_refused(tmp_path):
    home = make_tokenizer("llama3", tmp_path / "tok")
    made = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    names = ("<|begin_of_text|>", "<|eot_id|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        f"{names[0]} {names[1]} $A", special_tokens=[(name, made.token_to_id(name)) for name in names]
    )
    made.save(str(home / "tokenizer.json"))
    with pytest.raises(ConfigError, match="data.bos: tokenizer.json puts 2 tokens before a text"):
        open_prompts(load_tokenizer(home), None)
    assert open_prompts(load_tokenizer(home), False).start is None


# ---- the harness itself ------------------------------------------------------------------------------------

OWN_TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}} "
doc_to_choice: "{{{{a}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: brier_score}}]
"""
LIKELY_TASK = """
task: likely
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{q}}}} "
doc_to_target: "{{{{a[0]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
NEEDS = ("lm_eval", "accelerate")  # the latter for its models of transformers


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDS)), reason=f"{' and '.join(NEEDS)} are not installed"
)
@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3", "gemma", "deepseek"])
def test_scores_are_those_of_lm_eval_on_the_exported_folder(transformers, tmp_path, capsys, name):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    context = 16  # tokens: the last questions are cut
    run = trained(tmp_path, make_tokenizer(name, tmp_path / "tok"), capsys, "--model.context", context)
    assert convert.main(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    words = 2 * TEXT.replace(",", "").split()
    docs = [
        {"q": " ".join(words[:n]), "a": [words[n], "rat rat", words[n - 1]], "gold": n % 3}
        for n in range(1, 18)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_jsonl(folder / "docs.jsonl", docs)
    (folder / "own.yaml").write_text(OWN_TASK.format(folder=folder))
    (folder / "likely.yaml").write_text(LIKELY_TASK.format(folder=folder))

    theirs = simple_evaluate(  # reads the context from the exported config.json
        model="hf",
        model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32"},
        tasks=["own", "likely"],
        task_manager=TaskManager(include_path=str(folder)),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )["results"]
    capsys.readouterr()
    command = ["--tasks", "own", "likely", "--task-folder", folder, "--json"]
    assert evaluate.main([str(run), *map(str, command)]) == 0
    output = capsys.readouterr()
    ours = json.loads(output.out)["tasks"]  # stdout holds nothing else
    assert re.search(r"of \d+ texts, [1-9]\d* cut at their beginning to model.context", output.err)

    for task, metrics in {"own": ["acc", "acc_norm"], "likely": ["acc"]}.items():
        for metric in metrics:
            assert ours[task][metric] == theirs[task][f"{metric},none"], (task, metric)
    # of the probabilities of all choices
    assert ours["own"]["brier_score"] == pytest.approx(theirs["own"]["brier_score,none"], abs=1e-5)
    # exp of the mean log-likelihood, which does not saturate as those probabilities do
    assert ours["likely"]["perplexity"] == pytest.approx(theirs["likely"]["perplexity,none"], rel=1e-4)
