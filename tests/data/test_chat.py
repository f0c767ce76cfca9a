"""data/chat.py and prepare_data --chat: the tokens and the mask of transformers' apply_chat_template; the
loss of transformers with labels of -100; and every layout trains the same.
"""

import json

import numpy as np
import pytest
import torch
from chat_table import said
from prepared_data import (
    byte_level_bpe,
    check_layouts,
    loader_config,
    metrics,
    prepare,
    prepare_rows,
)
from ranks import MODEL, job

import config
from data import tokenizer
from data.chat import PlainChat, chat_format
from data.conversation import BadConversation, parse_messages, read_conversation
from data.indexed import BLOCK, ChecksumError, IndexedDataset, IndexedDatasetWriter
from data.loader import open_loader
from data.loss_mask import LossMaskBits

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the same text, with what counts marked by hand, as transformers and TRL want it
CHATML_MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 2's: no invitation to speak, and a turn ends with </s>
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
BRACKETS_MARKED = BRACKETS.replace(
    " {{ m.content | trim }}{{ eos_token }}",
    "{% generation %} {{ m.content | trim }}{{ eos_token }}{% endgeneration %}",
)
# Qwen3's way: the last answer begins with a block of reasoning, which earlier ones lose
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, CHATML_MARKED),
    "brackets": (BRACKETS, BRACKETS_MARKED),
    "thinking": (THINKING, THINKING_MARKED),
}


CHATS = [
    said("What is 2 + 2?", "4"),
    said("héllo 日本 🙂", "naïve 漢字 👩‍👩‍👧", "more\n\n lines", "  spaces kept  inside"),
    said("a", "b", "a", "b", "a", "b"),
    said("x" * 50, "def f(x):\n    return x\n"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE, with the special tokens of the templates."""
    home = tmp_path_factory.mktemp("tok")
    texts = [m["content"] for chat in CHATS for m in chat] + ["user assistant"]
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    byte_level_bpe(texts * 9, 400, special).save(str(home / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (home / "tokenizer_config.json").write_text(json.dumps(names))
    return home


def with_template(folder, home, template, inside=False):
    """The tokenizer with a template: in a file of its own, or inside tokenizer_config.json."""
    home.mkdir()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (home / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    if inside:
        named = {"tool_use": "no", "default": template}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    else:
        (home / "chat_template.jinja").write_text(template)
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return home


def encoded(home, chats):
    tok = tokenizer.load_tokenizer(home)
    form = chat_format(tok)
    return form.encode_batch(tok, [form.write(conversation(chat)) for chat in chats])


def conversation(messages):
    return read_conversation({"messages": messages})


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_mask_are_those_of_transformers(transformers, folder, tmp_path, name):
    """transformers is told by {% generation %} what counts; we find it ourselves, and read the marks too."""
    plain, marked = TEMPLATES[name]
    homes = [with_template(folder, tmp_path / "a", plain), with_template(folder, tmp_path / "b", marked)]
    homes.append(with_template(folder, tmp_path / "c", plain, inside=True))
    theirs = transformers.AutoTokenizer.from_pretrained(homes[1])
    assert theirs.apply_chat_template(CHATS[0], tokenize=False) == chat_format(
        tokenizer.load_tokenizer(homes[0])
    ).write(conversation(CHATS[0])).text
    for home in homes:
        for chat, ours in zip(CHATS, encoded(home, CHATS)):
            want = theirs.apply_chat_template(
                chat, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
            )
            assert ours.ids.tolist() == want["input_ids"]
            assert ours.counted.astype(int).tolist() == want["assistant_masks"], (home, chat)
            assert 0 < ours.counted.sum() < len(ours.ids)


@pytest.mark.parametrize("end, counted", [
    ("\n\n", ["b \n\n", "d\n\n"]),  # a reader knows by the lines that the turn has ended
    ("</s>\n\n", ["b </s>", "d</s>"]),
    (" .\n\n", ["b  .", "d ."]),
])
def test_white_space_after_an_answer_counts_where_nothing_else_ends_it(folder, tmp_path, end, counted):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    home = with_template(folder, tmp_path / "t", template)
    chat = chat_format(tokenizer.load_tokenizer(home)).write(conversation(said("a", "b ", "c", "d")))
    assert [chat.text[start:stop] for start, stop in chat.spans] == counted


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_file_that_pads_and_cuts_gives_whole_texts(folder, tmp_path, template):
    """As tokenizer.json of some models do, for a program that wants all texts equally long."""
    import tokenizers

    homes = []
    for number, name in enumerate("ab"):
        homes.append(with_template(folder, tmp_path / name, template or ""))
        if template is None:
            (homes[-1] / "chat_template.jinja").unlink()
        made = tokenizers.Tokenizer.from_file(str(homes[-1] / "tokenizer.json"))
        if number:
            made.enable_padding(length=64)
            made.enable_truncation(8)
        made.save(str(homes[-1] / "tokenizer.json"))
    for ours, theirs in zip(*(encoded(home, CHATS) for home in homes)):
        assert ours.ids.tolist() == theirs.ids.tolist() and ours.counted.tolist() == theirs.counted.tolist()


@pytest.mark.parametrize("name", [*TEMPLATES, None])
def test_a_record_that_is_written_whole_has_no_notes(folder, tmp_path, name):
    for number, template in enumerate(TEMPLATES.get(name, [None])):
        home = with_template(folder, tmp_path / f"{number}", template) if template else "bytes"
        form = chat_format(tokenizer.load_tokenizer(home))
        assert [form.write(conversation(chat)).notes for chat in CHATS] == [()] * len(CHATS)


def test_masks_are_the_same_with_the_librarys_offsets(folder, tmp_path):
    """They are asked for where text is changed, here by a normalizer in the second conversation."""
    home = with_template(folder, tmp_path / "t", TEMPLATES["chatml"][0])
    spec = json.loads((home / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    (home / "tokenizer.json").write_text(json.dumps(spec))
    chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
             for ask, answer in (("é 🙂", "\n🙂 漢字 "), ("e\u0301e\u0301", "a\u0308 b"),
                                 ("a", "<|im_end|> é"))]
    tok = tokenizer.load_tokenizer(home)
    form = chat_format(tok)
    written = [form.write(conversation(chat)) for chat in chats]
    found = form.encode_batch(tok, written)
    assert form.check is not None
    form.__dict__["check"] = None  # the library's for all
    for ours, told in zip(found, form.encode_batch(tok, written), strict=True):
        assert ours.ids.tolist() == told.ids.tolist() and ours.counted.tolist() == told.counted.tolist()
        assert ours.counted.any()


def test_the_plain_format_counts_answers_and_the_end():
    """The answer, its newline, and the end of the conversation if the answer is last."""
    tok = tokenizer.load_tokenizer("bytes")
    form = chat_format(tok)
    assert isinstance(form, PlainChat)
    chats = [form.write(conversation(chat)) for chat in (said("hi", "yó"), said("hi", "yo", "so"))]
    first, second = form.encode_batch(tok, chats)
    text = "user: hi\nassistant: yó\n"
    assert first.ids.tolist() == [*text.encode(), 256]
    assert first.counted.tolist() == [False] * 20 + [True] * 5
    assert second.ids.tolist() == [*b"user: hi\nassistant: yo\nuser: so\n", 256]
    assert second.counted.tolist() == [False] * 20 + [True] * 3 + [False] * 10


NOTHING_SAID = "'completion' holds no list of messages"
NO_PAIRS = "'history' is not a list of pairs of texts"


@pytest.mark.parametrize("record, reason", [
    *(({"messages": value}, "'messages' holds no list of messages") for value in ("text", [])),
    ({"messages": ["text"]}, "message 1 is not an object"),
    ({"messages": [{"content": "x"}]}, "message 1 has no role"),
    ({"messages": [{"role": "user", "content": 3}]}, "message 1 (user) has no text"),
    ({"messages": [{"role": "assistant", "content": "a\0b"}]}, "message 1 (assistant) has no text"),
    ({"messages": said("only a question")}, "'messages' has no message of the assistant"),
    ({"prompt": "a\0", "completion": "b"}, "'prompt' has no text"),
    ({"prompt": "a", "completion": "b\0"}, "'completion' has no text"),
    ({"prompt": "a", "chosen": "b\0"}, "'chosen' has no text"),
    ({"prompt": 3, "completion": "b"}, "'prompt' holds no list of messages"),
    *(({"prompt": "a", "completion": value}, NOTHING_SAID) for value in (None, 3, [], {"role": "user"})),
    ({"instruction": 3, "output": "b"}, "'instruction' has no text"),
    ({"instruction": "a", "output": None}, "'output' has no text"),
    ({"instruction": "a", "input": 3, "output": "b"}, "'input' has no text"),
    *(({"instruction": "a", "history": value, "output": "b"}, NO_PAIRS)
      for value in ("text", 3, ["text"], [["q"]], [["q", "r", "s"]], ["qr"])),
    *(({"instruction": "a", "history": [pair], "output": "b"}, "'history' has no text")
      for pair in (["q", 3], [None, "r"])),
    ({"messages": said("a", "b"), "system": 3}, "'system' is not text"),
    ({"messages": [{"role": "user", "content": None}, *said("a", "b")]}, "message 1 (user) has no text"),
    ({"messages": [{"role": "user"}, *said("a", "b")]}, "message 1 (user) has no text"),
    ({"messages": [{"role": 3, "content": "a"}, *said("a", "b")]}, "message 1 has no role"),
    ({"messages": [{**said("a")[0], "value": "c"}, *said("a", "b")]},
     "message 1 (user) has content and value that differ"),
    ({"messages": [*said("a"), {"from": "gpt", "value": "c", "content": "b"}]},
     "message 2 (assistant) has content and value that differ"),
    ({"messages": [*said("a"), {**said("a", "b")[1], "masked": 2}]},
     "message 2 (assistant): its masked is 2"),
    ({"messages": [{"role": "user", "content": ["a", 3]}]}, "message 1 (user) holds int"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 (user) has no text"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "thinking": 3}]},
     "message 2 (assistant): its reasoning_content has no text"),
    *(({"messages": [*said("a"), {"role": "assistant", "tool_calls": value}]},
       "message 2 (assistant): its tool_calls hold no name") for value in ("f", ["f"], {"name": 3}, [{}])),
    ({"messages": said("a", "b"), "tools": [3]}, "'tools' is not a list of definitions"),
    ({"messages": said("a", "b"), "functions": {"name": "f"}}, "'functions' is not a list of definitions"),
    ({"messages": said("a", "b"), "tools": [{}], "functions": [{}]}, "tools and functions both define"),
    ({"messages": said("a", "b"), "chat_template_kwargs": "x"}, "'chat_template_kwargs' is not an object"),
])
def test_the_field_that_cannot_be_read_is_named(record, reason):
    with pytest.raises(BadConversation) as error:
        read_conversation(record)
    assert str(error.value).startswith(reason)


def test_messages_of_sharegpt_and_of_parts_are_the_same():
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    parts = said("q", "a")
    parts[0]["content"] = [{"type": "text", "text": "q"}]
    assert parse_messages(sharegpt) == parse_messages(parts) == said("q", "a")


def messages_with(call):
    """A question, and a message with a call in each place in which records hold one."""
    spoken = {"role": "assistant", "content": ""}
    yield [*said("q"), {**spoken, "tool_calls": [call]}]
    yield [*said("q"), {**spoken, "function_call": call}]
    yield [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)}]


@pytest.mark.parametrize("call", [
    {"id": "c1", "type": "function", "function": {"name": "f", "parameters": {"city": "Paris"}}},
    {"name": "f", "parameters": {"city": "Paris"}},
    {"name": "f", "parameters": '{"city": "Paris"}', "arguments": None, "note": ""},
    {"name": "f", "arguments": {"city": "Paris"}, "index": 0, "id": "c1"},
])
def test_parameters_of_a_call_are_its_arguments(call):
    for chat in messages_with(call):
        found = conversation(chat).messages[1]["tool_calls"][0]
        assert found["function"] == {"name": "f", "arguments": {"city": "Paris"}}
        assert found.get("id") == call.get("id")


@pytest.mark.parametrize("call, reason", [
    ({"name": "f", "args": {"city": "Paris"}}, "holds 'args'"),
    ({"function": {"name": "f", "input": {"city": "Paris"}}}, "holds 'input'"),
    ({"function": {"name": "f"}, "arguments": {"city": "Paris"}}, "holds 'arguments' beside its function"),
    ({"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}, "arguments and parameters; keep one"),
])
def test_a_call_of_which_a_key_is_not_read_is_refused(call, reason):
    for chat in messages_with(call):
        with pytest.raises(BadConversation, match=rf"message 2 \(assistant\): its tool_calls.* {reason}"):
            conversation(chat)


def test_a_message_with_two_keys_of_calls_is_refused():
    call = {"name": "f", "arguments": {}}
    both = {"role": "assistant", "content": "", "tool_calls": [call], "function_call": {**call, "name": "g"}}
    with pytest.raises(BadConversation, match="message 2 .* tool_calls and function_call; keep one"):
        conversation([*said("q"), both])


# ---- the command -------------------------------------------------------------------------------------------

def many(count=40):
    rng = np.random.default_rng(0)
    letters = lambda size: "".join(map(chr, rng.integers(97, 123, size)))
    return [said(letters(rng.integers(1, 30)), letters(rng.integers(1, 30))) for _ in range(count)]


def test_a_path_to_the_messages_reads_what_stands_beside_them():
    messages = [{"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": "4"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    record = {"id": 3, "data": {"chat": messages, "tools": tools, "system": "Add.", "note": "x"}}
    found = read_conversation(record, "data.chat")
    assert found.messages == [{"role": "system", "content": "Add."}, *messages]
    assert found.tools == tools and found.unread == ("id", "note")
    with pytest.raises(BadConversation, match="no messages under 'data.none'"):
        read_conversation(record, "data.none")


def test_the_command_writes_what_the_loader_reads(folder, tmp_path, capsys):
    """Shards by several workers give the same files; the mask goes through windows, documents and a blend."""
    home = with_template(folder, tmp_path / "t", CHATML)
    rows = many()
    assert prepare_rows([{"messages": m} for m in rows], home, tmp_path / "a", "--chat") == 0
    assert "the template of chat_template.jinja; the loss counts" in capsys.readouterr().out
    assert (tmp_path / "a.tokenizer" / "chat_template.jinja").read_text() == CHATML
    names = {"user": "human", "assistant": "gpt"}
    share = []
    for chat in rows:
        share.append({"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]})
    words = ["--jsonl-key", "conversations", "--workers", "2"]
    assert prepare_rows(share, home, tmp_path / "b", "--chat", *words) == 0
    for end in (".bin", ".idx", ".mask", ".mask.crc"):
        assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"b{end}").read_bytes(), end
    said = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"]
    for meta in said:  # sha256: of the .json itself
        assert meta.pop("provenance") and meta.pop("sha256")
    assert said[0] == said[1]

    data = IndexedDataset(tmp_path / "a")
    want = encoded(home, rows)
    stream = np.concatenate([chat.ids for chat in want])
    counted = np.concatenate([chat.counted for chat in want])
    assert data.read(0, data.tokens).tolist() == stream.tolist()
    assert data.counted(0, data.tokens).tolist() == counted.tolist()
    assert data.meta["counted"] == counted.sum()

    with IndexedDatasetWriter(tmp_path / "plain", 400) as writer:
        for chat in want:
            writer.add(chat.ids)
        writer.finish(tokenizer.load_tokenizer(home), 1)
    for doc_mask in (False, True):
        cfg = loader_config(f"0.5 {tmp_path / 'a'} 0.5 {tmp_path / 'plain'}", 24, doc_mask=doc_mask)
        loader = open_loader(cfg, "train", 0, 1)
        starts = {data.document_start(number) for number in range(data.documents)}
        for step in range(3):
            locations = loader._locate_samples(4 * step, 4)
            targets = torch.cat([batch.targets for batch in loader.microbatches(step)])
            for (dataset, _, first), row in zip(locations, targets.tolist()):
                for place, target in enumerate(row, first + 1):
                    # an answer counts if its question, the beginning of its document, is in the window
                    is_whole = max(start for start in starts if start <= place) >= first
                    is_counted = (dataset == 1 or counted[place] and is_whole)
                    is_counted = is_counted and not (doc_mask and place in starts)
                    assert target == (stream[place] if is_counted else -100)
        # two ranks read the same rows
        halves = [open_loader(cfg, "train", rank, 2).microbatches(2) for rank in (0, 1)]
        assert torch.cat([batch.targets for half in halves for batch in half]).equal(targets)


@pytest.mark.parametrize("row, words, reason", [
    ({"text": "x"}, [], "no messages under 'messages'"),
    ({"messages": [{"role": "tool", "content": "x"}, *said("a", "b")]}, ["brackets"], "only user and"),
    ({"messages": said("a", "b")}, ["--no-append-eod"], "--no-append-eod"),
    ({"messages": said("a", "b")}, ["{% for"], "its chat template is invalid"),
])
def test_a_wrong_record_or_template_is_one_line(folder, tmp_path, capsys, row, words, reason):
    template = {"brackets": BRACKETS, "{% for": "{% for"}.get("".join(words), CHATML)
    home = with_template(folder, tmp_path / "t", template)
    options = [word for word in words if word.startswith("--")]
    assert prepare_rows([{"messages": said("a", "b")}, row], home, tmp_path / "a", "--chat", *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1 and reason in lines[0]
    assert not (tmp_path / "a.idx").exists()


def test_text_files_are_not_conversations(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x")
    words = ["--input", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "a"]
    assert prepare(*words, "--chat") == 2
    assert "not text" in capsys.readouterr().err


@pytest.mark.parametrize("named", [CHATML, [{"name": "default", "template": CHATML}], None])
def test_a_template_beside_a_sentencepiece_model_is_not_ignored(tmp_path, capsys, named):
    """Its control tokens are those of a tokenizer.json."""
    home = tmp_path / "t"
    home.mkdir()
    tokenizer.train_bpe([f"some text of a corpus {number}" for number in range(99)], 300,
                        home / "tokenizer.model")
    (home / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert prepare_rows([{"messages": said("a", "b")}], home, tmp_path / "a", "--chat") == (2 if named else 0)
    told = "has a chat template, which needs a tokenizer.json beside it"
    assert (told in capsys.readouterr().err) == bool(named)
    (home / "tokenizer_config.json").unlink()
    (home / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert prepare_rows([{"messages": said("a", "b")}], home, tmp_path / "b", "--chat") == 2
    assert told in capsys.readouterr().err


OTHER = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize("settings, of_map", [
    ({}, {}),
    ({"bos_token": None}, {}),
    ({"bos_token": OTHER | {"__type": "AddedToken"}}, {}),
    ({"image_token": "</s>"}, {}),
    ({"image_token": OTHER | {"__type": "AddedToken"}}, {}),
    ({"image_token": "<s>", "extra_special_tokens": {"image_token": "</s>"}}, {}),
    ({"extra_special_tokens": {"boi": "</s>", "bos_token": "</s>"}}, {}),
    ({"additional_special_tokens": {"boi": "</s>"}}, {}),
    ({"additional_special_tokens": ["<s>"], "extra_special_tokens": {"boi": "</s>"}}, {}),
    ({"extra_special_tokens": ["<s>"]}, {}),
    ({"model_specific_special_tokens": {"image_token": "</s>"}}, {}),
    ({"think_token": "<s>", "model_specific_special_tokens": {"image_token": "</s>"}}, {}),
    ({}, {"bos_token": "</s>"}),
    ({}, {"bos_token": OTHER}),
    ({}, {"bos_token": None}),
    ({}, {"image_token": "</s>"}),
    ({}, {"extra_special_tokens": {"image_token": "</s>"}}),
    ({"image_token": "<s>"}, {"image_token": "</s>"}),
    ({"added_tokens_decoder": {}}, {"bos_token": "</s>", "image_token": "</s>"}),
], ids=range(19))
def test_names_for_a_template_are_those_of_transformers(transformers, folder, tmp_path, settings, of_map):
    """Those of the model's own too, and those of special_tokens_map.json."""
    source = "{{ bos_token }}+{{ image_token }}+{{ boi }}+{{ think_token }}+{{ messages[0].content }}"
    home = with_template(folder, tmp_path / "t", source)
    (home / "special_tokens_map.json").write_text(json.dumps(of_map))
    named = json.loads((home / "tokenizer_config.json").read_text()) | settings
    (home / "tokenizer_config.json").write_text(json.dumps(named))
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    form = chat_format(tokenizer.load_tokenizer(home))
    assert form.names == theirs.special_tokens_map
    want = theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert form.render_turn_start([{"role": "user", "content": "a"}]) == want


# ---- the mask as a file ------------------------------------------------------------------------------------

def test_a_mask_is_written_in_parts_of_any_size():
    rng = np.random.default_rng(0)
    for size in (1, 7, 8, 9, 1000):
        mask = rng.random(size) < 0.5
        bits, content = LossMaskBits(), b""
        for part in np.split(mask, np.sort(rng.integers(0, size + 1, 5))):
            content += bits.get_bytes(part)
        content += bits.last_bytes()
        found = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")[:size]
        assert found.tolist() == mask.tolist()
        assert (bits.tokens, bits.counted, len(content)) == (size, mask.sum(), -(-size // 8))


def test_a_mask_that_is_flipped_lost_or_stale_is_noticed(tmp_path):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, 8 * BLOCK + 999)  # a block of the mask, and a part of one
    mask = rng.random(len(ids)) < 0.3
    with IndexedDatasetWriter(tmp_path / "a", 257, has_mask=True) as writer:
        writer.add(ids, mask)
        writer.finish()
    data = IndexedDataset(tmp_path / "a")
    for first, stop in ((0, 1), (3, 21), (8 * BLOCK - 5, 8 * BLOCK + 5), (len(ids) - 3, len(ids))):
        assert data.counted(first, stop).tolist() == mask[first:stop].tolist()
    identity = data.identity

    path = tmp_path / "a.mask"
    content = bytearray(path.read_bytes())
    content[BLOCK + 3] ^= 16
    path.write_bytes(content)
    data = IndexedDataset(tmp_path / "a")
    data.counted(0, 9)
    with pytest.raises(ChecksumError, match=r"a.mask: block 1 .* fails its crc32"):
        data.counted(8 * BLOCK, 8 * BLOCK + 1)
    path.unlink()
    with pytest.raises(config.ConfigError, match="a.mask: No such file"):
        IndexedDataset(tmp_path / "a")

    # the same tokens without a mask are other data; the old mask does not stay
    path.write_bytes(content)
    with IndexedDatasetWriter(tmp_path / "a", 257) as writer:
        writer.add(ids)
        writer.finish()
    data = IndexedDataset(tmp_path / "a")
    assert data.counted(0, 9) is None and data.identity != identity and not path.exists()


# ---- training ----------------------------------------------------------------------------------------------

LAYOUTS = ("--parallel.zero 1", "--parallel.cp 2", "--parallel.pp 2 --train.micro_batch 2", "--parallel.tp 2")


@pytest.mark.slow
@pytest.mark.parametrize("doc_mask", ["false", "true"])
def test_every_layout_trains_the_same(tmp_path, doc_mask):
    """And the mask counts: the same tokens without one train otherwise."""
    rows = [{"messages": chat} for chat in many(60)]
    assert prepare_rows(rows, "bytes", tmp_path / "chat", "--chat") == 0
    words = ["llama3-tiny", *MODEL, "--data.path", str(tmp_path / "chat"), "--data.doc_mask", doc_mask,
             "--train.steps", "3", "--data.split", "70,30",
             "--train.seq_len", "64"]  # which holds a question and its answer
    losses = check_layouts(tmp_path, words, LAYOUTS)
    assert len(losses) == 3 and metrics(tmp_path / "r0", "val_loss")

    for end in (".mask", ".mask.crc", ".json", ".crc"):
        (tmp_path / f"chat{end}").unlink()
    alone = [*words, "--train.dtype", "fp64", "--log.dir", str(tmp_path), "--log.name", "all"]
    assert job(tmp_path / "all", 1, alone).codes == [0]
    assert abs(metrics(tmp_path / "all", "loss")[0] - losses[0]) > 1e-4


def test_the_loss_is_that_of_transformers_with_labels(transformers, folder, tmp_path):
    """A Llama of transformers, imported and run by us on what the loader reads; its labels are -100 where the
    marks of its own template say that a token does not count."""
    from checkpoint.trained import load_run
    from scripts import convert

    home = with_template(folder, tmp_path / "t", CHATML)
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )
    theirs = transformers.LlamaForCausalLM(shape).double().eval()
    theirs.save_pretrained(tmp_path / "hf")
    for file in home.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    template_kept = (tmp_path / "run" / "tokenizer" / "chat_template.jinja").read_text()
    assert template_kept == CHATML

    rows = many(20)
    conversations = [{"messages": chat} for chat in rows]
    assert prepare_rows(conversations, tmp_path / "run" / "tokenizer", tmp_path / "a", "--chat") == 0
    reference = transformers.AutoTokenizer.from_pretrained(home)
    ids, labels, starts = [], [], []
    for chat in rows:
        starts.append(len(ids))
        told = reference.apply_chat_template(
            chat, chat_template=CHATML_MARKED, return_assistant_tokens_mask=True, return_dict=True,
            tokenize=True,
        )
        ids += told["input_ids"]
        labels += [x if m else -100 for x, m in zip(told["input_ids"], told["assistant_masks"])]

    loader = open_loader(loader_config(tmp_path / "a", seq_len=96), "train", 0, 1)
    ours = load_run(str(tmp_path / "run"), torch.device("cpu"), "fp64")
    batches = loader.microbatches(0)
    places = [first for _, _, first in loader._locate_samples(0, 4)]
    total = count = 0
    with torch.no_grad():
        for first in places[:len(batches)]:
            window = slice(first, first + 97)
            x, y = torch.tensor([ids[window]]), torch.tensor([labels[window]])
            y[:, :min(start for start in starts if start >= first) - first] = -100  # a question is cut away
            number = int((y[:, 1:] != -100).sum())
            if number:
                total += float(theirs(input_ids=x, labels=y).loss) * number
            count += number
    assert count == sum(int(batch.num_counted()) for batch in batches) > 0
    with torch.no_grad():
        summed = sum(float(ours.stage(batch.tokens, batch, 1.0)) for batch in batches)
    # transformers' norms and angles are in fp32, whatever the model's dtype
    assert summed / count == pytest.approx(total / count, rel=1e-6)
