"""data/tokenizer_files.py: the chat template that transformers takes of a folder, for every way in which
folders hold them, and copies that lose none."""
import json

import pytest
from prepared_data import byte_level_bpe, prepare_rows
from ranks import MODEL, job

from checkpoint.run_folder import refuse_links
from config import ConfigError
from data import tokenizer_files
from data.chat import PlainChat, chat_format
from data.conversation import BadConversation, read_conversation
from data.prompts import Prompts
from data.tokenizer import load_tokenizer

FILE, MORE, CONFIG = "chat_template.jinja", "additional_chat_templates/{}.jinja", "tokenizer_config.json"
PROCESSOR, LEGACY = "processor_config.json", "chat_template.json"
MESSAGES = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "so"}]
TOOLS = [{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}]


def written(name, tools=False):
    """A template that writes its own name."""
    return (f"{name}" + ("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" if tools else "")
            + "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}")


def named(**templates):
    return [{"name": name, "template": template} for name, template in templates.items()]


A, B, T = written("A"), written("B"), written("T", tools=True)
# {case: ({file: template, or what is under chat_template}, what writes a conversation, what one with tools)}
# A name is that of the place, as the report has it; None is refused.
FOLDERS = {
    "file": ({FILE: A}, FILE, None),
    "file, crlf": ({FILE: A.replace("<", "\r\n<")}, FILE, None),
    "settings": ({CONFIG: A}, f"chat_template in {CONFIG}", None),
    "list": ({CONFIG: named(default=A, tool_use=T)}, f"'default' of chat_template in {CONFIG}",
             f"'tool_use' of chat_template in {CONFIG}"),
    "object": ({CONFIG: {"default": A, "tool_use": T}}, f"'default' of chat_template in {CONFIG}",
               f"'tool_use' of chat_template in {CONFIG}"),
    "list, rag": ({CONFIG: named(rag=B, default=T)}, f"'default' of chat_template in {CONFIG}",
                  f"'default' of chat_template in {CONFIG}"),
    "list, tools alone": ({CONFIG: named(tool_use=T)}, None, f"'tool_use' of chat_template in {CONFIG}"),
    "list, neither": ({CONFIG: named(rag=A)}, None, None),
    "more": ({FILE: A, MORE.format("tool_use"): T}, FILE, MORE.format("tool_use")),
    "more, rag": ({FILE: T, MORE.format("rag"): B}, FILE, FILE),
    "more, tools alone": ({MORE.format("tool_use"): T}, None, MORE.format("tool_use")),
    "more, default": ({MORE.format("default"): T}, MORE.format("default"), MORE.format("default")),
    "more, file": ({MORE.format("file"): T}, MORE.format("file"), MORE.format("file")),
    "more, neither": ({MORE.format("rag"): A}, None, None),
    "file before settings": ({FILE: A, CONFIG: B}, FILE, None),
    "file before list": ({FILE: A, CONFIG: named(default=B, tool_use=T)}, FILE, None),
    "more before settings": ({MORE.format("tool_use"): T, CONFIG: A}, None, MORE.format("tool_use")),
    "same in both": ({FILE: T, CONFIG: T}, FILE, FILE),
    "same of a processor": ({CONFIG: T, LEGACY: T, PROCESSOR: T}, f"chat_template in {CONFIG}",
                            f"chat_template in {CONFIG}"),
    "no processor's": ({FILE: T, PROCESSOR: None, LEGACY: None}, FILE, FILE),
    "null": ({CONFIG: None}, "", ""),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer.json of bytes, without a template."""
    home = tmp_path_factory.mktemp("bare")
    byte_level_bpe((), 300, ["</s>"]).save(str(home / "tokenizer.json"))
    return home


def generation_folder(bare, home, files):
    """The tokenizer with templates in these files."""
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_files.write_files(home, {"tokenizer.json": (bare / "tokenizer.json").read_bytes()})
    for name, content in {CONFIG: ..., **files}.items():
        if name.endswith(".json"):
            around = settings if name == CONFIG else {}
            content = json.dumps(around if content is ... else {**around, "chat_template": content})
        tokenizer_files.write_files(home, {name: content.encode()})
    return home


def get_text(form, tools):
    try:
        return form.write(read_conversation({"messages": MESSAGES, "tools": tools})).text
    except BadConversation:
        return None


def text_of_transformers(theirs, tools):
    try:
        return theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    except ValueError:
        return None


@pytest.mark.parametrize("case", FOLDERS)
def test_the_template_is_that_of_transformers(transformers, bare, tmp_path, case):
    files, place, place_with_tools = FOLDERS[case]
    home = generation_folder(bare, tmp_path / "t", files)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    tok = load_tokenizer(home)
    wanted = {tools is not None: text_of_transformers(theirs, tools) for tools in (None, TOOLS)}
    if place is place_with_tools is None:
        assert wanted == {False: None, True: None}
        with pytest.raises(ConfigError, match=r"has no chat template called default, only .*rag"):
            chat_format(tok)
        return
    form = chat_format(tok)
    if place == "":
        assert wanted == {False: None, True: None} and isinstance(form, PlainChat)
        return
    assert get_text(form, None) == wanted[False]
    assert (place is None) == (wanted[False] is None)
    # a template that does not write the definitions is refused here, and not there
    assert get_text(form, TOOLS) == (wanted[True] if place_with_tools else None)
    assert wanted[True] is not None
    takes = form.with_tools or form
    assert form.place == (place or place_with_tools) and takes.place == (place_with_tools or place)


OF_PROCESSORS = {
    "legacy": ({LEGACY: T}, f"chat_template in {LEGACY}", ()),
    "processor": ({PROCESSOR: T}, f"chat_template in {PROCESSOR}", ()),
    "both": ({PROCESSOR: T, LEGACY: A}, f"chat_template in {PROCESSOR}", (f"chat_template in {LEGACY}",)),
}


@pytest.mark.parametrize("case", OF_PROCESSORS)
def test_the_template_of_a_processor_is_taken_where_the_tokenizer_has_none(bare, tmp_path, case):
    files, place, passed_over = OF_PROCESSORS[case]
    form = chat_format(load_tokenizer(generation_folder(bare, tmp_path / "t", files)))
    assert (form.place, form.passed_over) == (place, passed_over)
    assert [get_text(form, tools) for tools in (None, TOOLS)] == [
        "T<user>ask</s><assistant>so</s>", f"T{json.dumps(TOOLS[0])}<user>ask</s><assistant>so</s>"]


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PROCESSORS)
def test_the_template_of_a_processor_is_that_of_transformers(transformers, bare, tmp_path, case):
    """AutoProcessor takes it, and AutoTokenizer knows of none."""
    home = generation_folder(bare, tmp_path / "t", OF_PROCESSORS[case][0])
    assert transformers.AutoTokenizer.from_pretrained(home).chat_template is None
    processor, _ = transformers.ProcessorMixin.get_processor_dict(home)
    assert processor["chat_template"] == T


@pytest.mark.parametrize("files, told", [
    ({CONFIG: A, LEGACY: B}, f"chat_template in {CONFIG}, which transformers' AutoTokenizer takes, and "
                             f"chat_template in {LEGACY}, which AutoProcessor takes, differ; remove the one"),
    ({FILE: A, PROCESSOR: B}, f"{FILE}, which transformers' AutoTokenizer takes, and chat_template in "
                              f"{PROCESSOR}, which"),
    ({FILE: A, MORE.format("default"): B}, "are two templates called 'default'; remove one"),
    ({FILE: A, MORE.format("file"): B}, "are two templates called 'default'; remove one"),
    ({CONFIG: [*named(default=A), *named(default=B)]}, "are two templates called 'default'; remove one"),
    ({CONFIG: 3}, f"chat_template in {CONFIG}: is neither text nor a list of names and templates"),
    ({CONFIG: [A]}, f"chat_template in {CONFIG}: is neither text nor a list of names and templates"),
    ({CONFIG: [{"name": "default"}]}, f"chat_template in {CONFIG}: is neither text nor a list"),
    ({LEGACY: named(tool_use=A)}, f"'tool_use' of chat_template in {LEGACY} is not text; write it to {FILE}"),
    ({FILE: "{% for %}"}, f"repair {FILE}"),
    ({FILE: A, MORE.format("tool_use"): "{% for %}"}, f"repair {MORE.format('tool_use')}"),
    ({CONFIG: "{% for %}"}, f"repair chat_template in {CONFIG}"),
], ids=range(12))
def test_templates_that_contradict_each_other_are_refused(bare, tmp_path, capsys, files, told):
    home = generation_folder(bare, tmp_path / "t", files)
    assert prepare(tmp_path, home, {"messages": MESSAGES}) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_template_that_is_not_utf8_is_refused(bare, tmp_path, capsys):
    home = generation_folder(bare, tmp_path / "t", {})
    (home / FILE).write_bytes(b"\xff")
    assert prepare(tmp_path, home, {"messages": MESSAGES}) == 2
    assert "chat_template.jinja: is not UTF-8; repair it" in capsys.readouterr().err


def prepare(tmp_path, home, *records):
    return prepare_rows(records, home, tmp_path / "a", "--chat")


def test_the_report_names_the_files_and_the_copy_has_them(bare, tmp_path, capsys):
    files = {FILE: A, MORE.format("tool_use"): T, MORE.format("rag"): B, CONFIG: B}
    home = generation_folder(bare, tmp_path / "t", files)
    records = [{"messages": MESSAGES}, {"messages": MESSAGES, "tools": TOOLS}]
    for _ in range(2):  # the second replaces what the first has made
        assert prepare(tmp_path, home, *records) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the template of {FILE}; {MORE.format('tool_use')} with tools; transformers ignores" in said
    assert f"chat_template in {CONFIG}; the loss counts" in said
    copied = tmp_path / "a.tokenizer"
    assert tokenizer_files.read_files(copied) == tokenizer_files.read_files(home)
    assert MORE.format("rag") in tokenizer_files.read_files(copied)

    (copied / "additional_chat_templates" / "notes.txt").write_text("mine")
    (tmp_path / "a.json").unlink()
    assert prepare(tmp_path, home, *records) == 2
    assert "holds additional_chat_templates/notes.txt, which no copy" in capsys.readouterr().err


def test_a_conversation_without_a_template_of_its_own_is_refused_with_its_line(bare, tmp_path, capsys):
    home = generation_folder(bare, tmp_path / "t", {MORE.format("tool_use"): T})
    assert prepare(tmp_path, home, {"messages": MESSAGES, "tools": TOOLS}, {"messages": MESSAGES}) == 2
    told = capsys.readouterr().err
    assert "a.jsonl:2: the tokenizer has no chat template called default" in told
    assert f"write the other to {FILE}" in told
    assert prepare(tmp_path, home, {"messages": MESSAGES, "tools": TOOLS}) == 0
    with pytest.raises(ConfigError, match="the conversation: the tokenizer has no chat template called"):
        Prompts(load_tokenizer(home)).chat(MESSAGES[:1])


def test_copies_bring_the_templates_of_one_folder(bare, tmp_path):
    """A template of another folder beside a template of its own would take its place."""
    def copied(files, beside):
        number = len(list(tmp_path.iterdir()))
        target = generation_folder(bare, tmp_path / f"{number}a", files)
        tokenizer_files.copy_files(generation_folder(bare, tmp_path / f"{number}b", beside), target)
        return {name: template.source for name, template in
                tokenizer_files.find_templates(tokenizer_files.read_files(target)).by_name.items()}

    both = {FILE: A, MORE.format("tool_use"): T}
    assert copied({}, both) == {"default": A, "tool_use": T}
    assert copied({}, {CONFIG: named(default=A, tool_use=T)}) == {"default": A, "tool_use": T}
    assert copied({}, {LEGACY: A}) == {"default": A}
    for own in ({CONFIG: B}, {FILE: B}, {LEGACY: B}):
        assert copied(own, both) == copied(own, {CONFIG: A}) == {"default": B}
    assert copied({MORE.format("tool_use"): T}, {FILE: A}) == {"tool_use": T}


@pytest.mark.parametrize("own, is_chat, kept, told", [
    ({FILE: A}, True, {"default": A}, "template the one that the data was prepared with, not that of {home}"),
    ({}, True, {}, "template none, not that of {home}"),
    ({}, False, {"default": B, "tool_use": T}, ""),
    ({FILE: B, MORE.format("tool_use"): T}, True, {"default": B, "tool_use": T}, ""),
], ids=["another", "plain", "text", "the same"])
def test_a_run_on_conversations_keeps_the_template_that_wrote_them(bare, tmp_path, own, is_chat, kept, told):
    home = generation_folder(bare, tmp_path / "other", {CONFIG: named(default=B, tool_use=T)})
    record = {"messages": MESSAGES, "text": "some text of a page"}
    words = ["--chat"] if is_chat else []
    own_folder = generation_folder(bare, tmp_path / "t", own)
    assert prepare_rows([record] * 40, own_folder, tmp_path / "a", *words) == 0
    end = job(tmp_path, 1, ["llama3-tiny", *MODEL, "--data.path", str(tmp_path / "a"), "--data.tokenizer",
                            str(home), "--data.pack", "best_fit", "--train.seq_len", "32",
                            "--train.steps", "1", "--log.dir", str(tmp_path), "--log.name", "r"])
    assert end.codes == [0], end.logs
    files = tokenizer_files.read_files(tmp_path / "r" / "tokenizer")
    assert tokenizer_files.load_templates(files) == kept
    said = " ".join(end.logs[0].split())
    assert told.format(home=home) in said and ("template" in said) == bool(told)


def test_a_run_writes_no_template_through_a_link(tmp_path):
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir(parents=True)
    refuse_links(tmp_path)
    (tmp_path / "tokenizer" / MORE.format("tool_use")).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="tool_use.jinja: is a link"):
        refuse_links(tmp_path)


def test_a_template_beside_a_tokenizer_of_bytes_is_refused_and_kept(tmp_path, capsys):
    home = tmp_path / "t"
    home.mkdir()
    tokenizer_files.write_files(home, {"tokenizer.bytes": b"", FILE: A.encode(), MORE.format("x"): b""})
    assert prepare(tmp_path, home, {"messages": MESSAGES}) == 2
    assert "has a chat template, which needs a tokenizer.json beside it" in capsys.readouterr().err
    (tmp_path / "copy").mkdir()
    load_tokenizer(home).save(tmp_path / "copy")
    assert tokenizer_files.read_files(tmp_path / "copy") == tokenizer_files.read_files(home)
