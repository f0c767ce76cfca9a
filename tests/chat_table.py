"""Chat templates, what transformers and TRL make of them, and a table of what we do.

    python tests/chat_table.py       prints the table of lab/docs/chat-templates.md

The published templates are those of the package trl, if it is installed (pip install --no-deps trl), by the
names of their files; NAME_training marks with {% generation %} what counts of NAME. OWN has a template of
each kind that needs care.
"""
import copy
import datetime
import functools
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from data.chat import FIXED_DATE, chat_format
from data.conversation import BadConversation, read_conversation
from data.tokenizer import load_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROL = re.compile(r"<[|｜][^\s<>|｜]*[|｜]>|<[|]?[a-z_]+[|]?>|\[[A-Z_/]+\]")


def said(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


WEATHER = {"type": "function", "function": {
    "name": "get_weather",
    "description": "Weather of a city, né",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "a large city"}},
        "required": ["city"],
    },
}}
CALL = {"id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Pa\"ris"}}}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "rainy, 5"}
THOUGHT = "<think>\nhm {}\n</think>\n\nanswer {}"
CONVERSATIONS = {
    "one turn": {"messages": said("What is 2 + 2?", "Four")},
    "two turns": {"messages": said("first", "one", "second", "two\n")},
    "system": {"messages": [{"role": "system", "content": "be nice"}, *said("first", "one")]},
    "developer": {"messages": [{"role": "developer", "content": "be nice"}, *said("first", "one")]},
    "spaces": {"messages": said("  ask ", "  a b \n")},
    "empty": {"messages": said("ask", "")},
    "reasoning": {"messages": [*said("ask"),
                               {"role": "assistant", "content": "so", "reasoning_content": "hm"}]},
    "think": {"messages": said("ask", THOUGHT.format(1, 1))},
    "think twice": {"messages": said("ask", THOUGHT.format(1, 1), "more", THOUGHT.format(2, 2))},
    "call": {"messages": [*said("ask"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT,
                          {"role": "assistant", "content": "it rains"}], "tools": [WEATHER]},
}


INVITATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OWN = {
    # one turn as the other
    "turns": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + INVITATION + "{# <tool_call> #}"
    ),
    # looks ahead for the last question, and drops what was thought before it; tools and calls
    "thoughts": (
        "{% set ns = namespace(asked=-1) %}"
        "{% for m in messages if m.role == 'user' %}{% set ns.asked = messages.index(m) %}{% endfor %}"
        "{% if tools %}<|im_start|>system\n"
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set thought = m.reasoning_content or '' %}{% set content = m.content or '' %}"
        "{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>assistant\n"
        "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
        "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for call in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ call.function.name }}", '
        '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + INVITATION
    ),
    # cannot do without the date
    "dated": (
        "<|im_start|>system\nCurrent date: {{ strftime_now('%Y-%m-%d') }}<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + INVITATION
    ),
    # contents are lists of parts; the roles have other names; nothing ends the last turn
    "parts": (
        "{% for m in messages %}<|{{ 'model' if m.role == 'assistant' else m.role }}|>"
        "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|model|>{% endif %}"
    ),
    # marks what counts
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}" + INVITATION
    ),
}


@functools.cache
def templates():
    """{name: template}: OWN, and those of trl."""
    found = dict(OWN)
    package = importlib.util.find_spec("trl")
    for folder in package.submodule_search_locations if package else ():
        for file in sorted(Path(folder, "chat_templates").glob("*.jinja")):
            found[file.stem] = file.read_text()
    return found


def published():
    """The names of the templates of trl."""
    return [name for name in templates() if name not in OWN and not name.endswith("_training")]


def tokenizer_folder(home, template):
    """A tokenizer of bytes, with the control tokens that the template spells. Returns the folder."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*NAMES.values()])
    # published tokenizers do not call <think> and markers of tools special
    spelled = [token for token in dict.fromkeys(CONTROL.findall(template)) if token not in NAMES.values()]
    made.add_special_tokens([token for token in spelled if "|" in token])
    made.add_tokens([token for token in spelled if "|" not in token])
    home.mkdir(parents=True, exist_ok=True)
    made.save(str(home / "tokenizer.json"))
    settings = {**NAMES, "tokenizer_class": "PreTrainedTokenizerFast"}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    (home / "chat_template.jinja").write_text(template)
    return home


def our_text(home, record):
    """A record as prepare_data --chat makes it. Raises BadConversation."""
    return chat_format(load_tokenizer(home), FIXED_DATE).write(read_conversation(copy.deepcopy(record)))


def their_text(template, record):
    """(text, spans) of transformers; spans where the template marks them."""
    from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

    compiled = _compile_jinja_template(template)
    day = datetime.datetime.strptime(FIXED_DATE, "%Y-%m-%d")
    return _render_with_assistant_indices(compiled, record["messages"], record.get("tools"), None, False,
                                          strftime_now=day.strftime, **NAMES)


def forms(record):
    """The record, and the same with other roles and contents that templates expect."""
    yield record
    parts = copy.deepcopy(record)
    for message in parts["messages"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    yield parts
    for each in (record, parts):
        system = copy.deepcopy(each)
        for message in system["messages"]:
            if message["role"] == "developer":
                message["role"] = "system"
        yield system
    text = copy.deepcopy(record)
    for message in text["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    yield text


def counted_letters(text, spans):
    """The text with [ ] around what counts; white space at the ends of a part counts for neither side."""
    shown, end = "", 0
    for start, stop in spans:
        part = text[start:stop]
        start += len(part) - len(part.lstrip())
        stop = max(start, stop - (len(part) - len(part.rstrip())))
        if stop > start:
            shown += text[end:start] + "[" + text[start:stop] + "]"
            end = stop
    return (shown + text[end:]).replace("][", "")


def verdict(home, name, record):
    """(cell of the table, what is beside the training twin): + is right, ! is wrong."""
    known = templates()
    try:
        ours = our_text(home, record)
    except BadConversation as error:
        reason = str(error)
        if "refuses it" in reason:
            return "refuses", ""
        for key in ("reasoning", "tool_calls", "tools", "content"):
            if key in reason and "is left out" in reason:
                return f"no {key.replace('tool_', '')}", ""
        return f"! {reason}", ""

    # the text is that of transformers, in one of the forms
    for form in forms(record):
        for renamed in ("reasoning_content", "reasoning", "thinking"):
            again = json.loads(json.dumps(form).replace('"reasoning_content"', f'"{renamed}"'))
            try:
                text, spans = their_text(known[name], again)
            except Exception:  # a template refuses in many classes
                continue
            if text == ours.text:
                break
        else:
            continue
        break
    else:
        return "! other text", ""

    # what counts is what the twin marks
    marked = known.get(f"{name}_training")
    if marked is None and not spans:
        return "+", "no twin"
    if marked is not None:
        try:
            text, spans = their_text(marked, again)
        except Exception as error:
            return f"! {error}", ""
        if text != ours.text:
            return "+", "writes other text"
    want, found = counted_letters(text, spans), counted_letters(ours.text, ours.spans)
    if want == found:
        return "+", "the same"
    for header in ("<｜Assistant｜>", "<|start|>assistant"):
        if re.sub(rf"\[{re.escape(header)}(\s*)", rf"{header}\1[", want) == found:
            return "+", "counts the header"
    if re.sub(r"\[</s>\]$", "</s>", want) == found:
        return "+", "counts </s>"
    return f"! {found!r} beside {want!r}", ""


def table():
    """The lines of the table."""
    lines = ["| template | " + " | ".join(CONVERSATIONS) + " | beside TRL's twin |",
             "|---" * (len(CONVERSATIONS) + 2) + "|"]
    with tempfile.TemporaryDirectory() as scratch:
        for name in published():
            home = tokenizer_folder(Path(scratch, name), templates()[name])
            cells, beside = zip(*(verdict(home, name, record) for record in CONVERSATIONS.values()))
            twin = ", ".join(dict.fromkeys(filter(None, beside)))
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {twin} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
