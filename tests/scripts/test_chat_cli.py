"""A run that is tuned on conversations, and talking to it: prepare_data --chat, train.py, generate --chat."""

import io
import json

import pytest
import tokenizers
from ranks import MODEL
from tokenizer_families import make_tokenizer

import runtime.evaluate
import train
from config import ConfigError
from scripts import generate, prepare_data

GREEDY = ("--temperature", "0", "--max-new-tokens", "8")
LONG = "--train.seq_len 64 --data.split 80,20 --train.dtype fp32 --optim.lr 0.02 --eval.sample 8".split()


def tuned(home, tokenizer, *more):
    """A run of four steps on conversations."""
    chats = [
        [{"role": "user", "content": f"the cat {number}"}, {"role": "assistant", "content": "sat on the mat"}]
        for number in range(10, 70)
    ]
    (home / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    words = ["--chat", "--input", home / "chats.jsonl", "--tokenizer", tokenizer, "--out", home / "chats"]
    assert prepare_data.main([*map(str, words), "--workers", "1"]) == 0
    settings = ["--data.path", home / "chats", "--log.dir", home, "--log.name", "run", "--train.steps", "4"]
    assert train.main(["llama3-tiny", *MODEL, *LONG, *map(str, settings), *more]) == 0
    return home / "run"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    home = tmp_path_factory.mktemp("chatml")
    return tuned(home, make_tokenizer("qwen3", home / "tok"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run whose tokenizer has no template."""
    return tuned(tmp_path_factory.mktemp("plain"), "bytes")


def lines(capsys, *words):
    """The lines that scripts.generate prints, and its notes."""
    capsys.readouterr()
    assert generate.main([*map(str, words), *GREEDY]) == 0
    told = capsys.readouterr()
    return told.out.splitlines(), told.err


def objects(capsys, *words):
    return [json.loads(line) for line in lines(capsys, *words, "--json")[0]]


def chatml_ids(home, *messages):
    """The ids of ChatML, its control tokens by their names."""
    own = tokenizers.Tokenizer.from_file(str(home / "tok" / "tokenizer.json"))
    ids = []
    for role, content in messages:
        parts = own.encode(f"{role}\n{content}").ids, own.encode("\n").ids
        ids += [own.token_to_id("<|im_start|>"), *parts[0], own.token_to_id("<|im_end|>"), *parts[1]]
    return [*ids, own.token_to_id("<|im_start|>"), *own.encode("assistant\n").ids]


def prompts_of(monkeypatch, module):
    """The prompts that a module gives to the model, and what ends the texts."""
    seen = []
    real = module.generate

    def spied(logits, prompt, *args, **options):
        seen.append((prompt, options["stops"]))
        return real(logits, prompt, *args, **options)

    monkeypatch.setattr(module, "generate", spied)
    return seen


def test_samples_of_the_run_are_answers(tmp_path, monkeypatch, capsys):
    seen = prompts_of(monkeypatch, runtime.evaluate)
    run = tuned(tmp_path, make_tokenizer("qwen3", tmp_path / "tok"))
    said = capsys.readouterr().out
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tok" / "tokenizer.json"))
    (prompt, stops), *_ = seen
    content = own.decode(prompt, skip_special_tokens=False).split("\n")[1].removesuffix("<|im_end|>")
    assert content.startswith("the cat ") and prompt == chatml_ids(tmp_path, ("user", content))
    assert own.token_to_id("<|im_end|>") in stops
    assert f"<|im_start|>user {content}" in " ".join(said.replace("\\n", " ").split())
    assert f"python -m scripts.generate {run} --chat" in " ".join(said.split())


def test_a_prompt_of_the_user_s_own(tmp_path, monkeypatch):
    seen = prompts_of(monkeypatch, runtime.evaluate)
    tuned(tmp_path, make_tokenizer("qwen3", tmp_path / "tok"), "--eval.prompt", "hello")
    assert seen[0][0] == chatml_ids(tmp_path, ("user", "hello"))


def test_turns_on_the_command_line_and_in_the_terminal(chatml, monkeypatch, capsys):
    seen = prompts_of(monkeypatch, generate)
    words, _ = lines(capsys, chatml, "--system", "be brief", "--chat", "the cat", "--chat", "and then")
    assert len(words) == 2 and not any("im_" in word for word in words)
    turns = [("system", "be brief"), ("user", "the cat"), ("assistant", words[0]), ("user", "and then")]
    assert [prompt for prompt, _ in seen] == [
        chatml_ids(chatml.parent, *turns[:2]), chatml_ids(chatml.parent, *turns)
    ]
    for option in (["--chat"], ["--chat", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nand then\n"))
        assert lines(capsys, chatml, "--system", "be brief", *option)[0] == words


def test_an_answer_ends_where_a_turn_ends(chatml, monkeypatch, capsys):
    own = tokenizers.Tokenizer.from_file(str(chatml.parent / "tok" / "tokenizer.json"))
    ids = iter([*own.encode("a mat").ids, own.token_to_id("<|im_end|>"), *own.encode("\nuser").ids])

    def written(logits, prompt, most, *, stops, **_):
        for token in ids:
            if token in stops:
                return
            yield token

    monkeypatch.setattr(generate, "generate", written)
    assert lines(capsys, chatml, "--chat", "the cat")[0] == ["a mat"]


def test_the_plain_format_ends_an_answer_where_the_user_would_speak(plain, monkeypatch, capsys):
    """Its marks are text: an answer ends where the user would speak."""
    written = list(b"on a mat\nuser: more") + [1] * 99
    given = []

    def spied(logits, prompt, *_, **__):
        given.append(prompt)
        yield from written

    monkeypatch.setattr(generate, "generate", spied)
    found, _ = lines(capsys, plain, "--chat", "hi", "--chat", "so")
    assert found == ["on a mat", "on a mat"]
    assert given == [list(b"user: hi\nassistant: "),
                     list(b"user: hi\nassistant: on a mat\nuser: so\nassistant: ")]


def test_control_tokens_of_a_prompt_and_what_is_said_of_them(chatml, plain, capsys):
    turn = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    (as_text,) = objects(capsys, chatml, "--prompt", turn)
    (special,) = objects(capsys, chatml, "--prompt", turn, "--special")
    (asked,) = objects(capsys, chatml, "--chat", "the cat")
    assert special["prompt_tokens"] == asked["prompt_tokens"] < as_text["prompt_tokens"]
    assert special["text"] == turn + asked["text"]
    _, note = lines(capsys, chatml, "--prompt", turn)
    assert note.startswith("note: <|im_start|> in --prompt is read as text; --special reads control tokens")
    for run in (chatml, plain):
        assert lines(capsys, run, "--prompt", "the cat")[1].startswith("note: this run was trained on conv")


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--prompt", "a", "--chat", "b"], "--prompt: cannot be used with --chat"),
        (["--special", "--chat", "b"], "--special: cannot be used with --chat"),
        (["--samples", "2", "--chat", "b"], "--samples: cannot be used with --chat"),
        (["--system", "a"], "--system: is for --chat"),
        (["--special", "--prompt", "a"], "--special: text spells no control token of the tokenizer bytes"),
        (["--chat", "a" * 9000], "--chat: the conversation has 9018 tokens, and the model's context is"),
    ],
    ids=["prompt", "special", "samples", "system", "bytes", "context"],
)
def test_what_does_not_go_together(plain, words, problem):
    with pytest.raises(ConfigError, match=f"^{problem}"):
        generate.main([str(plain), *words])


def test_a_template_that_refuses_is_one_line(tmp_path, capsys):
    run = tuned(tmp_path, make_tokenizer("llama2", tmp_path / "tok"))
    with pytest.raises(ConfigError, match="^the conversation: the chat template refuses it: Only user and"):
        generate.main([str(run), "--system", "be brief", "--chat", "hi"])
