"""Files of a tokenizer folder: names, copies, and the chat templates that transformers loads.

    chat_template.jinja                      the template called default
    additional_chat_templates/NAME.jinja     others; tool_use is for conversations with tools
    tokenizer_config.json                    chat_template: text, or a list of names and templates; ignored if
                                             a file of the two kinds above exists
    processor_config.json, chat_template.json    chat_template, also for vision models: AutoProcessor takes
                                             the first of the two, AutoTokenizer neither
"""
import io
import json
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any, NamedTuple

from config import ConfigError
from data.contract import SETTINGS, TOKENIZER_CONFIG

OWN_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes")  # the first one in a folder is read
COPIED = (  # in addition to the templates
    *OWN_FILES[:2],
    *(name for name in SETTINGS if name != "config.json"),  # which belongs to a model
    "added_tokens.json", "vocab.json", "merges.txt",  # read by transformers, if present
)
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
OF_PROCESSORS = ("processor_config.json", "chat_template.json")  # the first that has one is used
DEFAULT, WITH_TOOLS = "default", "tool_use"
SAME_AS_DEFAULT = (DEFAULT, "file")  # names in MORE_TEMPLATES that AutoTokenizer treats as CHAT_TEMPLATE


class ChatTemplate(NamedTuple):
    """A template, and the file that contains it."""
    source: str
    place: str


class ChatTemplates(NamedTuple):
    """The templates that transformers loads, by name. `passed_over` lists files with templates it ignores."""
    by_name: dict[str, ChatTemplate]
    passed_over: tuple[str, ...] = ()


# ---- files -------------------------------------------------------------------------------------------------

def read_files(folder: pathlib.Path) -> dict[str, bytes]:
    """Return {name: content} of the tokenizer's other files in a folder: special tokens, templates."""
    names = [*SETTINGS, *template_files(folder)]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def without_ids(files: dict[str, bytes]) -> dict[str, bytes]:
    """Drop files that belong to a model, or repeat the tokenizer's main file."""
    return {name: content for name, content in files.items()
            if name == TOKENIZER_CONFIG or name not in SETTINGS}


def write_files(folder: pathlib.Path | str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def copy_files(source: pathlib.Path, target: pathlib.Path, with_templates: bool = True) -> None:
    """Copy the tokenizer files that `target` lacks from `source`. Templates are only copied on request, and
    only if the target has none, since they would override its templates."""
    lacks_template = with_templates and not has_template(read_files(target))
    for name in (*COPIED, *(template_files(source) if lacks_template else ())):
        if (source / name).is_file() and not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)

    settings, others = [json.loads(read_files(folder).get(TOKENIZER_CONFIG, b"{}"))
                        for folder in (target, source)]
    if lacks_template and others.get("chat_template") and not settings.get("chat_template"):
        settings["chat_template"] = others["chat_template"]
        (target / TOKENIZER_CONFIG).write_text(json.dumps(settings, ensure_ascii=False, indent=2))


def is_of_a_copy(name: str) -> bool:
    """Return whether write_files writes a file of this name for a tokenizer."""
    inner = name.removeprefix(f"{MORE_TEMPLATES}/")
    is_template = name in (CHAT_TEMPLATE, *OF_PROCESSORS) or inner != name and inner.endswith(".jinja")
    return is_template or name in (*OWN_FILES, *SETTINGS)


# ---- templates ---------------------------------------------------------------------------------------------

def template_files(folder: pathlib.Path) -> list[str]:
    """Return the names of the template files in a folder, apart from tokenizer_config.json."""
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    paths = [*(folder / name for name in (CHAT_TEMPLATE, *OF_PROCESSORS)), *more]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def has_template(files: dict[str, bytes]) -> bool:
    """Return whether these files include a chat template, valid or not."""
    return load_templates(files) != {}


def load_templates(files: dict[str, bytes]) -> dict[str, str] | None:
    """Return {name: template} from find_templates, or None if the files are rejected."""
    try:
        return {name: template.source for name, template in find_templates(files).by_name.items()}
    except ConfigError:
        return None


def find_templates(files: dict[str, bytes]) -> ChatTemplates:
    """Find the templates in a tokenizer's files. Raises ConfigError for an unreadable file, and for files
    that contradict each other."""
    written = of_jinja_files(files)
    named = of_json(TOKENIZER_CONFIG, files)
    of_processor = [found for found in (of_json(name, files) for name in OF_PROCESSORS) if found]
    for found in of_processor:
        if set(found) != {DEFAULT}:
            raise ConfigError(f"{found.popitem()[1].place} is not text; write it to {CHAT_TEMPLATE}")

    first, *others = [found for found in (written, named, *of_processor[:1]) if found] or [{}]
    passed_over = [template.place for found in (*others, *of_processor[1:])
                   for name, template in found.items()
                   if name not in first or template.source != first[name].source]
    for found in of_processor[:1]:
        theirs, ours = found[DEFAULT], first.get(DEFAULT, found[DEFAULT])
        if theirs.source != ours.source:
            raise ConfigError(f"{ours.place}, which transformers' AutoTokenizer takes, and {theirs.place}, "
                              "which AutoProcessor takes, differ; remove the one that the model does not "
                              "know")
    return ChatTemplates(first, tuple(dict.fromkeys(passed_over)))


def of_jinja_files(files: dict[str, bytes]) -> dict[str, ChatTemplate]:
    """Return the templates in separate files."""
    results: list[tuple[str, ChatTemplate]] = []
    for file in sorted(files, reverse=True):
        folder, _, name = file.rpartition("/")
        name = name.removesuffix(".jinja")
        if file == CHAT_TEMPLATE or (folder == MORE_TEMPLATES and name in SAME_AS_DEFAULT):
            name = DEFAULT
        elif folder != MORE_TEMPLATES:
            continue
        results.append((name, ChatTemplate(get_text(files[file], file), file)))
    return by_name(results)


def of_json(file: str, files: dict[str, bytes]) -> dict[str, ChatTemplate]:
    """Return the templates under chat_template in a JSON file."""
    if file not in files:
        return {}
    try:
        content = json.loads(files[file])
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from None
    said = content.get("chat_template") if isinstance(content, dict) else None
    place = f"chat_template in {file}"
    if said is None:
        return {}
    if isinstance(said, str):
        said = {DEFAULT: said}
    entries: Any = said.items() if isinstance(said, dict) else said
    if isinstance(said, list):
        entries = [(entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
                   for entry in said]
    results: list[tuple[str, ChatTemplate]] = []
    for name, source in entries if isinstance(said, (dict, list)) else [(None, None)]:
        if not isinstance(name, str) or not isinstance(source, str):
            raise ConfigError(f"{place}: is neither text nor a list of names and templates; repair it")
        where = place if said == {DEFAULT: source} else f"{name!r} of {place}"
        results.append((name, ChatTemplate(source, where)))
    return by_name(results)


def by_name(found: Iterable[tuple[str, ChatTemplate]]) -> dict[str, ChatTemplate]:
    """Return the templates by name. Raises ConfigError if two with the same name differ."""
    named: dict[str, ChatTemplate] = {}
    for name, template in found:
        other = named.setdefault(name, template)
        if other.source != template.source:
            raise ConfigError(f"{other.place} and {template.place} are two templates called {name!r}; "
                              "remove one")
    return named


def get_text(content: bytes, file: str) -> str:
    """Decode a file, with universal newlines like Python's open. Raises ConfigError."""
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8; repair it") from None
