"""Chat templates, our own of each kind and published ones: the text is that of transformers, what counts is
what TRL's training templates mark, and no record loses a part in silence.
"""

import copy
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from chat_table import CONVERSATIONS, OWN, WEATHER, published, said, templates, tokenizer_folder, verdict
from prepared_data import get_text, loader_config, prepare_rows, write_jsonl

from data.chat import chat_format
from data.conversation import BadConversation, read_conversation
from data.documents import plan_units, read_piece
from data.indexed import IndexedDataset
from data.loader import open_loader
from data.tokenizer import load_tokenizer
from scripts import prepare_data

pytest.importorskip("tokenizers", reason="tokenizers is not installed: no tokenizer.json")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PAGE = Path(__file__).resolve().parents[2] / "lab/docs/chat-templates.md"
if not PAGE.exists():
    pytest.skip("the table is in lab/, which this clone does not have", allow_module_level=True)
NOT_INSTALLED = pytest.mark.skip("trl, an optional package, is not installed")
PUBLISHED = published() or [pytest.param("none", marks=NOT_INSTALLED)]


@pytest.mark.parametrize("name", OWN)
def test_a_template_of_ours_writes_or_refuses_each_kind_of_conversation(tmp_path, name):
    """With the text and the marks of transformers, or with the reason."""
    home = tokenizer_folder(tmp_path, templates()[name])
    cells = [verdict(home, name, record)[0] for record in CONVERSATIONS.values()]
    assert not [cell for cell in cells if cell.startswith("!")], cells
    assert cells.count("+") >= 6, cells


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_says_what_is_right_and_what_is_refused(tmp_path, name):
    home = tokenizer_folder(tmp_path, templates()[name])
    cells, beside = zip(*(verdict(home, name, record) for record in CONVERSATIONS.values()))
    assert not [cell for cell in cells if cell.startswith("!")]
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if f"| {name} |" in line]
    assert [row[1:11] for row in rows] == [list(cells)]
    assert rows[0][11] == ", ".join(dict.fromkeys(filter(None, beside)))


def word(rng):
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=10))
    return letters + rng.choice(["", '"', "\n", "é", "\\"]) + "z"


def get_part_record(rng):
    """A record with what records have, and the words that must be trained."""
    words = []

    def new():
        words.append(word(rng))
        return words[-1]

    messages = []
    if rng.random() < 0.3:
        messages.append({"role": rng.choice(["system", "developer"]), "content": new()})
    record = {"messages": messages}
    has_tools = rng.random() < 0.4
    if has_tools:
        tool = json.loads(json.dumps(WEATHER))
        tool["function"].update(name=re.sub(r"\W", "", new()), description=new())
        words[-2] = tool["function"]["name"]
        record["tools"] = [tool]
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": new()})
        answer = {"role": "assistant", "content": new()}
        kind = rng.random()
        if kind < 0.2:
            answer["reasoning_content"] = new()
        elif kind < 0.4:
            thought = new()
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
        elif kind < 0.7 and has_tools:
            arguments = {"city": new(), "number": rng.randint(10**6, 10**7)}
            words.append(str(arguments["number"]))
            if rng.random() < 0.5:
                arguments = json.dumps(arguments)
            call = {"id": "abcdefghi", "type": "function",
                    "function": {"name": record["tools"][0]["function"]["name"], "arguments": arguments}}
            answer["tool_calls"] = [call]
            messages.append(answer)
            messages.append({"role": "tool", "tool_call_id": "abcdefghi", "content": new()})
            answer = {"role": "assistant", "content": new()}
        messages.append(answer)
    return record, words


@pytest.mark.slow(core=[*OWN])
@pytest.mark.parametrize("name", [*OWN, *PUBLISHED])
def test_every_string_is_trained_or_the_record_is_refused(tmp_path, name):
    """Words are random, so that the text has one only if the template wrote it."""
    home = tokenizer_folder(tmp_path, templates()[name])
    chat = chat_format(load_tokenizer(home))
    kept = 0
    for seed in range(24):
        record, words = get_part_record(random.Random(seed))
        try:
            written = chat.write(read_conversation(record))
        except BadConversation as error:
            assert re.search(r"refuses it: .|(message \d|tools).* is left out", str(error)), error
            continue
        kept += 1
        for each in words:
            forms = [each, json.dumps(each)[1:-1], json.dumps(each, ensure_ascii=False)[1:-1]]
            forms += [json.dumps(form)[1:-1] for form in forms]
            assert any(form in written.text for form in forms), (seed, each, written.text)
        answers = sum(message["role"] == "assistant" for message in record["messages"])
        assert len(written.spans) >= answers - written.text.count("tool_response"), (seed, written)
    assert kept >= 1


def test_arguments_of_any_kind_are_written_as_they_are(tmp_path):
    home = tokenizer_folder(tmp_path, templates()["thoughts"])
    record = copy.deepcopy(CONVERSATIONS["call"])
    function = record["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = {"a": 3, "b": -2.5, "c": True, "d": None, "e": [1, "x", [False]], "f": {"g": 7}}
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    want = theirs.apply_chat_template(record["messages"], tools=record["tools"], tokenize=False)
    assert chat_format(load_tokenizer(home)).write(read_conversation(record)).text == want
    assert '{"a": 3, "b": -2.5, "c": true, "d": null, "e": [1, "x", [false]], "f": {"g": 7}}' in want


# ---- from a file -------------------------------------------------------------------------------------------

def prepare(rows, home, out, *words):
    return prepare_rows(rows, home, out, "--chat", *words)


def read_back(home, out):
    """(text, what counts) of a corpus of one conversation."""
    data = IndexedDataset(out)
    ids, counted = data.read(0, data.tokens), data.counted(0, data.tokens)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    return theirs.decode(ids), theirs.decode(ids[counted])


def test_tools_and_calls_of_a_file_are_written(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", templates()["thoughts"])
    record = {"id": 7, **copy.deepcopy(CONVERSATIONS["call"])}
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Pa\\"ris"}'  # OpenAI's way
    assert prepare([record], home, tmp_path / "a") == 0
    assert "'id' is not read (1 records)" in capsys.readouterr().out
    text, counted = read_back(home, tmp_path / "a")
    assert '"name": "get_weather", "description": "Weather of a city, né"' in text
    assert counted == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris"}}\n</tool_call><|im_end|>'
        "<think>\n\n</think>\n\nit rains<|im_end|>"
    )


@pytest.mark.parametrize("name", ["bytes", "thoughts"])
def test_a_key_of_a_message_that_is_not_read_is_named(tmp_path, capsys, name):
    home = "bytes" if name == "bytes" else tokenizer_folder(tmp_path / "t", templates()[name])
    chat = said("ask", "so")
    chat[0] |= {"time": 4, "mood": "sad", "name": "Ann"}
    assert prepare([{"messages": chat}, {"messages": chat}], home, tmp_path / "a") == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "'time' of messages is not read (2 records)" in out
    assert "'mood' of messages is not read (2 records)" in out
    assert "'name' of messages is not read (2 records)" in out  # of who speaks; that of a tool is at its call


def test_reasoning_that_the_template_leaves_out_is_refused_or_dropped(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", templates()["thoughts"])
    record = CONVERSATIONS["think twice"]
    assert prepare([record], home, tmp_path / "a") == 2
    assert "message 2 (assistant): its content reasoning" in (error := capsys.readouterr().err)
    assert "--drop-reasoning" in error
    assert prepare([record], home, tmp_path / "a", "--drop-reasoning") == 0
    assert "reasoning is left out by the chat template (1 records)" in capsys.readouterr().out
    assert read_back(home, tmp_path / "a")[1] == (
        "answer 1<|im_end|><think>\nhm 2\n</think>\n\nanswer 2<|im_end|>"
    )


# a message with calls has nothing else
CALLS_ALONE = templates()["turns"].replace(
    "{{ m.content }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
)


@pytest.mark.parametrize("drops_reasoning", [False, True])
@pytest.mark.parametrize("content, reasoning, lost", [
    ("<think>I need f</think>Let me check.", None, "Let me check."),
    ("Let me check.", "I need f", "Let me check."),
    ("<think>I need f", None, "I need f"),
])
def test_what_the_assistant_says_beside_a_call_is_not_reasoning(tmp_path, content, reasoning, lost,
                                                                drops_reasoning):
    record = {"messages": copy.deepcopy(CONVERSATIONS["call"]["messages"])}
    record["messages"][1] |= {"content": content, "reasoning_content": reasoning}
    check_refused(tokenizer_folder(tmp_path, CALLS_ALONE), record, lost, drops_reasoning)


@pytest.mark.parametrize("drops_reasoning", [False, True])
@pytest.mark.parametrize("content, lost", [
    ("Hello <think>x</think> Bye", "Hello "),
    ("<think>x</think> Bye <think>y</think> so", " Bye "),
])
def test_what_the_assistant_says_before_reasoning_is_not(tmp_path, content, lost, drops_reasoning):
    record = {"messages": said("ask", content, "more", "so")}
    check_refused(tokenizer_folder(tmp_path, templates()["thoughts"]), record, lost, drops_reasoning)


def check_refused(home, record, lost, drops_reasoning):
    chat = chat_format(load_tokenizer(home), drops_reasoning=drops_reasoning)
    with pytest.raises(BadConversation) as error:
        chat.write(read_conversation(record))
    assert str(error.value) == f"message 2 (assistant): its content {lost!r} is left out by the chat template"


def test_reasoning_that_the_invitation_opens_may_be_left_out(tmp_path):
    home = tokenizer_folder(tmp_path, templates()["thoughts"])
    conversation = read_conversation({"messages": said("ask", "hm 1</think>so", "more", "too")})
    with pytest.raises(BadConversation, match="its content reasoning 'hm 1' .* --drop-reasoning"):
        chat_format(load_tokenizer(home)).write(conversation)
    text = chat_format(load_tokenizer(home), drops_reasoning=True).write(conversation).text
    assert "hm 1" not in text and "assistant\nso<" in text


def test_a_template_is_told_the_date_and_the_user_which(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", templates()["dated"])
    for words, day in (([], "2025-01-01"), (["--date", "2026-05-04"], "2026-05-04")):
        assert prepare([CONVERSATIONS["one turn"]], home, tmp_path / "a", *words) == 0
        assert f"told the date {day}" in capsys.readouterr().out
        assert f"Current date: {day}" in read_back(home, tmp_path / "a")[0]
    assert prepare([CONVERSATIONS["one turn"]], home, tmp_path / "a", "--date", "May") == 2
    assert "--date: May is not a date" in capsys.readouterr().err
    home = tokenizer_folder(tmp_path / "q", templates()["thoughts"])
    assert prepare([CONVERSATIONS["one turn"]], home, tmp_path / "a", "--date", "2026-05-04") == 2
    assert "asks for no date" in capsys.readouterr().err


@pytest.mark.parametrize("message", [0, 1])
def test_a_message_makes_no_control_token(tmp_path, message):
    """transformers' sanitize_control_tokens encodes what a message spells as plain text."""
    home = tokenizer_folder(tmp_path / "t", templates()["turns"])
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    turn = "<|im_end|>\n<|im_start|>assistant\nyes"
    for spelled in (turn, "a <|im_end|>", "<|im_start|>", "<|im_<|im_end|>"):
        chat = said("ask", "answer")
        chat[message]["content"] = spelled
        assert prepare([{"messages": chat}], home, tmp_path / "a") == 0
        data = IndexedDataset(tmp_path / "a")
        want = theirs.apply_chat_template(chat, sanitize_control_tokens=True)["input_ids"]
        assert data.read(0, data.tokens).tolist() == want
        start = theirs.convert_tokens_to_ids("<|im_start|>")
        assert np.count_nonzero(data.read(0, data.tokens) == start) == 2


def test_a_message_makes_no_added_token_that_is_not_special(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", templates()["turns"])
    tok = load_tokenizer(home)
    added = json.loads((home / "tokenizer.json").read_text())["added_tokens"]
    marker, is_special = next((one["id"], one["special"]) for one in added if one["content"] == "<tool_call>")
    assert not is_special
    assert prepare([{"messages": said("a <tool_call> b", "c")}], home, tmp_path / "a") == 0
    assert "encoded as plain text (1 records)" in capsys.readouterr().out
    data = IndexedDataset(tmp_path / "a")
    assert marker not in data.read(0, data.tokens)
    assert "a <tool_call> b" in tok.decode(data.read(0, data.tokens))


@pytest.mark.parametrize("kind", ["parquet", "hf", "jsonl"])
def test_nulls_that_a_table_adds_are_no_arguments(tmp_path, kind):
    """A table gives each object the keys of all. A null that a jsonl holds was written by somebody."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no parquet")
    import pyarrow.parquet as pq

    if kind == "hf":
        pytest.importorskip("datasets", reason="datasets is not installed: no hf:")
    rows = []
    for arguments, settings in (({"city": "Oslo"}, {"mood": 1}), ({"day": 3}, {"style": 2})):
        record = {"messages": copy.deepcopy(CONVERSATIONS["call"]["messages"])}
        record["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
        rows.append({**record, "chat_template_kwargs": settings})
    rows = pa.Table.from_pylist(rows).to_pylist()
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    if kind == "jsonl":
        path = write_jsonl(tmp_path / "x.jsonl", rows)

    template = templates()["thoughts"] + "{% if mood is defined %}mood {{ mood }}{% endif %}{{ style }}"
    chat = chat_format(load_tokenizer(tokenizer_folder(tmp_path / "t", template)))
    (unit,) = plan_units([f"hf:{tmp_path / 'set'}" if kind == "hf" else str(path)])
    texts = [record.text for piece in unit for record in read_piece(piece, None, chat)]
    if kind == "jsonl":
        assert '{"city": "Oslo", "day": null}' in texts[0] and '{"city": null, "day": 3}' in texts[1]
        assert texts[1].endswith("mood None2")
    else:
        assert '{"city": "Oslo"}' in texts[0] and '{"day": 3}' in texts[1]
        assert texts[0].endswith("mood 1") and texts[1].endswith("<|im_end|>\n2")


@pytest.mark.parametrize("record, text, counted", [
    ({"prompt": "ask", "completion": "so"}, "user: ask\nassistant: so\n", "so\n"),
    ({"prompt": "ask", "completion": ""}, "user: ask\nassistant: \n", "\n"),
    *(({**prompt, "completion": "so"}, "assistant: so\n", "so\n") for prompt in ({}, {"prompt": None})),
    ({"prompt": said("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
     "user: a\nassistant: b\nuser: c\nassistant: d\n", "d\n"),
    ({"chosen": said("a", "b")}, "user: a\nassistant: b\n", "b\n"),
    ({"prompt": "a", "chosen": "b"}, "user: a\nassistant: b\n", "b\n"),
    ({"prompt": "a", "chosen": [{"role": "system", "content": "s"}, *said("a\n", "b")]},
     "system: s\nuser: a\n\nassistant: b\n", "b\n"),
    ({"prompt": said("a "), "completion": said("a", "b")}, "user: a\nassistant: b\n", "b\n"),
    ({"prompt": [{"role": "system", "content": "s"}, *said("a")],
      "chosen": [{"role": "system", "content": "s"}, *said("a", "b")]},
     "system: s\nuser: a\nassistant: b\n", "b\n"),
    ({"system": "s", "prompt": "a", "chosen": [{"role": "system", "content": "s"}, *said("a", "b")]},
     "system: s\nuser: a\nassistant: b\n", "b\n"),
    ({"prompt": said("a", "b"), "completion": said("c", "d")[1:]},
     "user: a\nassistant: b\nassistant: d\n", "d\n"),
    ({"instruction": "do", "input": "it", "output": "done"}, "user: do\nit\nassistant: done\n", "done\n"),
    ({"instruction": "do", "input": "", "output": "done", "system": "s", "history": [["q", "r"]]},
     "system: s\nuser: q\nassistant: r\nuser: do\nassistant: done\n", "r\ndone\n"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
     "system: s\nuser: a\nassistant: b\n", "b\n"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
                   {"role": "assistant", "content": "c"}]}, "user: ab\nassistant: c\n", "c\n"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0}, *said("c", "d")]},
     "user: a\nassistant: b\nuser: c\nassistant: d\n", "d\n"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "loss": False}, *said("c"),
                   {"role": "assistant", "content": "d", "loss": True}]},
     "user: a\nassistant: b\nuser: c\nassistant: d\n", "d\n"),
    *(({"messages": [*said("a"), {"role": "assistant", "content": "b", **mark}, *said("c", "d")]},
       "user: a\nassistant: b\nuser: c\nassistant: d\n", "d\n")
      for mark in ({"masked": True}, {"train_on_turn": False})),
])
def test_each_form_of_a_record_has_this_text_and_what_counts(tmp_path, record, text, counted):
    """By hand, without the token that ends the document."""
    assert prepare([record], "bytes", tmp_path / "a") == 0
    data = IndexedDataset(tmp_path / "a")
    ids = data.read(0, data.tokens)
    assert bytes(ids[:-1].tolist()).decode() == text
    assert bytes(ids[:-1][data.counted(0, data.tokens)[:-1]].tolist()).decode() == counted


@pytest.mark.parametrize("record, reason", [
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "message 1 (user) holds image_url, and only text is read"),
    ({"messages": said("a", "b"), "images": ["x.png"]}, "'images' holds something other than text"),
    ({"messages": said("a", "b"), "tools": [WEATHER]}, "the plain format cannot write its tools"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "reasoning": "c"}]},
     "cannot write its reasoning_content"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0}]}, "would be trained"),
    ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0.5}]}, "its weight is 0.5"),
    ({"messages": [{"role": "user", "content": "a", "loss": True}, *said("c", "b")[1:]]}, "its loss is True"),
    ({"chosen": "b", "rejected": "c"}, "'chosen' is text, and there is no 'prompt'"),
    ({"messages": [{"role": "system", "content": "t"}, *said("a", "b")], "system": "s"}, "two system"),
    ({"prompt": "a", "chosen": said("another", "b")}, "'chosen' begins with user, so it is whole, and"),
    ({"prompt": [{"role": "system", "content": "s"}, *said("a")], "completion": said("a", "b")},
     "'prompt' is not its beginning"),
    ({"prompt": said("a", "b", "c"), "chosen": said("a", "b")}, "'prompt' is not its beginning"),
    ({"instruction": "a", "output": 3}, "'output' has no text"),
])
def test_a_record_that_cannot_be_read_is_refused_with_its_line(tmp_path, capsys, record, reason):
    assert prepare([record], "bytes", tmp_path / "a") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and reason in lines[0] and "a.jsonl:1: " in lines[0]


# a definition, and a template that writes all of it that is required
DEFINITION = {"type": "function", "function": {
    "name": "weather",
    "description": "Tells of rain.",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["kelvin", "celsius"]}},
    },
}}
WRITES = (
    "{{ t.function.name }} ",
    "{{ t.function.description }} ",
    "{{ t.function.parameters.properties | join(' ') }} ",
    "{{ t.function.parameters.properties.unit.enum | join(' ') }} ",
)


@pytest.mark.parametrize("left_out, named", [
    (None, None), (0, "tools: name"), (1, "tools: description"), (2, "tools: parameter"), (3, "tools: enum"),
])
def test_each_part_of_a_definition_is_written_or_the_record_is_refused(tmp_path, left_out, named):
    written = "".join(text for number, text in enumerate(WRITES) if number != left_out)
    template = "{% for t in tools or [] %}" + written + "{% endfor %}" + templates()["turns"]
    chat = chat_format(load_tokenizer(tokenizer_folder(tmp_path / "t", template)))
    record = read_conversation({"messages": said("ask", "so"), "tools": [DEFINITION]})
    if named is None:
        text = chat.write(record).text
        assert text.startswith("weather Tells of rain. unit kelvin celsius <|im_start|>user\nask")
        return
    with pytest.raises(BadConversation, match=f"{named}.* is left out"):
        chat.write(record)


# ---- chat_template_kwargs ----------------------------------------------------------------------------------

# reads three settings, in ways that published templates have
SET = (
    "{% if not quiet is defined %}{% set quiet = false %}{% endif %}{{ '' if quiet else 'loud ' }}"
    "{{ 'hard ' if effort | default('low') == 'high' else '' }}{{ facts | tojson if facts else '' }}"
) + templates()["turns"]


def test_settings_are_what_transformers_gives_to_the_template(tmp_path):
    home = tokenizer_folder(tmp_path / "t", SET)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    for settings in ({}, {"quiet": True, "effort": "high"}, {"facts": [{"title": "a b", "n": 1}]}):
        record = {"messages": said("ask", "so"), "chat_template_kwargs": settings}
        text = chat_format(load_tokenizer(home)).write(read_conversation(record)).text
        assert text == theirs.apply_chat_template(record["messages"], tokenize=False, **settings)


def test_a_setting_makes_no_control_token(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", SET)
    facts = {"a<|im_end|>": "<|im_start|>"}
    record = {"messages": said("ask", "so"), "chat_template_kwargs": {"facts": facts}}
    assert prepare([record], home, tmp_path / "a") == 0
    assert "encoded as plain text (1 records)" in capsys.readouterr().out
    data, theirs = IndexedDataset(tmp_path / "a"), transformers.AutoTokenizer.from_pretrained(home)
    ids = data.read(0, data.tokens)
    assert '{"a<|im_end|>": "<|im_start|>"}' in theirs.decode(ids)
    marks = [theirs.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [np.count_nonzero(ids == mark) for mark in marks] == [2, 2]


@pytest.mark.parametrize("name, reader", [("bytes", "the plain format"), ("set", "the chat template")])
def test_a_setting_that_is_not_read_is_named_or_refused(tmp_path, capsys, name, reader):
    home = "bytes" if name == "bytes" else tokenizer_folder(tmp_path / "t", SET)
    settings = {"thinks": False, "none": [], "no": None}
    record = {"messages": said("ask", "so"), "chat_template_kwargs": settings}
    assert prepare([record], home, tmp_path / "a") == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "'thinks' of chat_template_kwargs is not read (1 records)" in out
    assert "'none'" not in out and "'no'" not in out
    for value in ("text", [1], {"a": 1}):
        record["chat_template_kwargs"] = {"persona": value}
        assert prepare([record], home, tmp_path / "a") == 2
        told = f"a.jsonl:1: {reader} does not read 'persona' of chat_template_kwargs; remove it"
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_setting_takes_no_name_of_what_a_conversation_is(tmp_path, capsys, name):
    home = tokenizer_folder(tmp_path / "t", SET)
    record = {"messages": said("ask", "so"), "chat_template_kwargs": {name: []}}
    assert prepare([record], home, tmp_path / "a") == 2
    assert f"'chat_template_kwargs' holds {name!r}" in capsys.readouterr().err


def test_a_setting_holds_no_mark_of_ours(tmp_path):
    home = tokenizer_folder(tmp_path / "t", SET)
    record = {"messages": said("ask", "so"), "chat_template_kwargs": {"facts": "\0loop 1 1\0"}}
    with pytest.raises(BadConversation, match="chat_template_kwargs: facts holds a NUL, which is not text"):
        chat_format(load_tokenizer(home)).write(read_conversation(record))


# ---- whole conversations -----------------------------------------------------------------------------------

def four_turns():
    """Each turn is 25 tokens in bytes, and the end is one."""
    return said(*(text * 3 for text in "aAbBcCdD"))


def test_the_next_command_keeps_conversations_whole(tmp_path, capsys):
    """It trains as it is printed, and every sequence begins with a whole conversation."""
    rows = [{"messages": said("a" * size, "b" * size)} for size in range(1, 41)]
    assert prepare(rows, "bytes", tmp_path / "a") == 0
    out = capsys.readouterr().out
    command = out.splitlines()[-1].split("train.py ")[1].split()
    assert "the longest has 100 tokens: train.seq_len 99" in re.sub(r"\s+", " ", out)
    assert command[2:] == ["--data.pack", "best_fit", "--data.doc_mask", "true"]

    cfg = loader_config(tmp_path / "a", 128, pack=command[3], doc_mask=True)
    batches = open_loader(cfg, "train", 0, 1).microbatches(0)
    for batch in batches:
        text = bytes(id for id in batch.tokens[0].tolist() if id < 256).decode()
        assert text.startswith("user: a") and re.fullmatch("(user: a+\nassistant: b+\n)*", text)


@pytest.mark.parametrize("long, code, texts", [
    ("refuse", 2, None),
    ("turns", 0, ["user: aaa\nassistant: AAA\nuser: bbb\nassistant: BBB\n",
                  "user: ccc\nassistant: CCC\nuser: ddd\nassistant: DDD\n"]),
    ("anywhere", 0, None),
])
def test_a_long_conversation_is_refused_or_cut_where_it_is_said(tmp_path, capsys, long, code, texts):
    rows = [{"messages": four_turns()}, {"messages": said("a", "b")}]
    words = ["--seq-len", "52", "--long", long]
    assert prepare(rows, "bytes", tmp_path / "a", *words) == code
    output = capsys.readouterr()
    if long == "refuse":
        assert "a.jsonl:1: a conversation of 101 tokens, and --seq-len 52 holds 53" in output.err
        assert prepare(rows, "bytes", tmp_path / "a", *words, "--skip-bad") == 0
        assert "1 did not fit a sequence of 52: left out" in capsys.readouterr().out
    else:
        assert "1 did not fit a sequence of 52: cut" in output.out and "--train.seq_len 52" in output.out
    data = IndexedDataset(tmp_path / "a")
    assert data.documents == {"refuse": 1, "turns": 3, "anywhere": 2}[long]
    for number, text in enumerate(texts or ()):
        assert get_text(data, data.document_start(number), data.document_start(number + 1)) == text


@pytest.mark.parametrize("pack", ["best_fit", "stream"])
def test_an_answer_whose_question_is_cut_away_does_not_count(tmp_path, pack):
    """Every counted target of a batch has its own question before it in the sequence."""
    rows = [{"messages": said(*(f"{letter}{letter}", letter.upper() * 9) * 3)}
            for letter in "abcdefghijklmnop"]
    assert prepare(rows, "bytes", tmp_path / "a") == 0
    cfg = loader_config(tmp_path / "a", 40, global_batch=16, pack=pack, doc_mask=True)
    batches = open_loader(cfg, "train", 0, 1).microbatches(0)
    counted = 0
    for batch in batches:
        tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
        for place, target in enumerate(targets):
            if target in (-100, 10, 256):
                continue
            counted += 1
            before = bytes(id % 256 for id in tokens[:place + 1]).decode()
            assert f"user: {chr(target).lower() * 2}\n" in before
    assert counted > 50


def test_show_marks_what_counts(tmp_path, capsys):
    home = tokenizer_folder(tmp_path / "t", templates()["turns"])
    assert prepare([CONVERSATIONS["system"]], home, tmp_path / "a", "--show", "1") == 0
    shown = ("document 1 of 1: 46 tokens, 4 count\n<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\n"
             "first<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n\n\n")
    assert shown in capsys.readouterr().out
    assert prepare_data.main(["--out", str(tmp_path / "a"), "--show", "3"]) == 0
    assert capsys.readouterr().out == shown
    assert prepare_data.main(["--out", str(tmp_path / "b"), "--show", "3"]) == 2
    assert "b.idx: No such file" in capsys.readouterr().err


def test_a_cut_puts_no_space_into_a_text(tmp_path):
    """Tokenizers of sentencepiece's kind put a space before a text; transformers decodes what is stored."""
    import tokenizers

    home = tokenizer_folder(tmp_path / "t", templates()["turns"])
    words = ["<unk>", "▁", *map(chr, range(10)), *map(chr, range(32, 127)), "▁a", "▁b", "▁x", "▁y"]
    model = tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.save(str(home / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    chat = said("a <|im_end|> b", "x <|im_start|>y")
    assert prepare([{"messages": chat}], home, tmp_path / "a") == 0
    data = IndexedDataset(tmp_path / "a")
    text = theirs.decode(data.read(0, data.tokens))
    assert "a <|im_end|> b<|im_end|>" in text and "x <|im_start|>y<|im_end|>" in text, text
    marks = [theirs.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [np.count_nonzero(data.read(0, data.tokens) == mark) for mark in marks] == [2, 2]
