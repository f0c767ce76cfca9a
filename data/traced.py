"""Strings that track which string of a record each character comes from.

A chat template rearranges the strings of a conversation: it trims them, splits off reasoning, encodes them as
JSON, drops some. TracedText is a str, so a template branches and writes as usual, while its methods propagate
the source of each character. traced_environment is transformers' template environment with three additions
that do not change the text:

    ~, join, tojson        keep the sources
    loops over messages    mark which message the text inside belongs to
    {% generation %}       marks its content

Marks are enclosed in two NULs in the text, which strings of a record may not contain.

Source: transformers, utils/chat_template_utils.py, for the template environment.
"""
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jinja2

MARK = re.compile("\0([^\0]*)\0")
TEMPLATE = "\0"  # source of a character written by the template itself
MARKS = "_traced_marks"  # template variable {name: mark} with the marks so far
MAX_SOURCES = 0x10FFFF  # a source is one character
PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001|\\\\ue000([0-9]+)\\\\ue001")  # plain, or in ASCII JSON
STR_METHODS = ("join", "replace")  # methods of template strings that may take traced ones


class TracedText(str):
    """A string with `sources`, one per character: TEMPLATE or source_mark(number of the string)."""
    sources: str

    def __new__(cls, text: str, sources: str) -> "TracedText":
        made = super().__new__(cls, text)
        made.sources = sources
        return made

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return TracedText, (str.__str__(self), self.sources)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, where: Any) -> "TracedText":
        return TracedText(super().__getitem__(where), self.sources[where])

    def __iter__(self) -> Iterator["TracedText"]:
        return map(self.__getitem__, range(len(self)))

    def __mul__(self, times: Any) -> "TracedText":
        return TracedText(super().__mul__(times), self.sources * times)

    def join(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        for part in parts:
            pieces += [self, part] if pieces else [part]
        return joined(pieces)

    # ---- ends ----------------------------------------------------------------------------------------------

    def lstrip(self, characters: str | None = None) -> "TracedText":
        return self[len(self) - len(super().lstrip(characters)):]

    def rstrip(self, characters: str | None = None) -> "TracedText":
        return self[:len(super().rstrip(characters))]

    def strip(self, characters: str | None = None) -> "TracedText":
        return self.lstrip(characters).rstrip(characters)

    def removeprefix(self, prefix: str) -> "TracedText":
        return self[len(prefix):] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "TracedText":
        return self[:len(self) - len(suffix)] if self.endswith(suffix) else self

    # ---- parts ---------------------------------------------------------------------------------------------

    def split(self, separator: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._located(super().split(separator, maxsplit), separator)

    def rsplit(self, separator: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._located(super().rsplit(separator, maxsplit), separator)

    def splitlines(self, keepends: Any = False) -> list[str]:
        return self._located(super().splitlines(keepends), None)

    def partition(self, separator: str) -> tuple[str, ...]:
        return tuple(self._located(super().partition(separator), ""))

    def rpartition(self, separator: str) -> tuple[str, ...]:
        return tuple(self._located(super().rpartition(separator), ""))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        return TracedText(new, char_sources(new)).join(self.split(old, count))

    def _located(self, parts: Iterable[str], separator: str | None) -> list[str]:
        """Return the parts of this text with their sources, split at `separator` or at white space."""
        place = 0
        results: list[str] = []
        for part in parts:
            if separator is None:
                place = self.find(part, place)
            results.append(self[place:place + len(part)])
            place += len(part) + len(separator or "")
        return results

    # ---- letters -------------------------------------------------------------------------------------------

    def upper(self) -> "TracedText":
        return self._rewritten(super().upper())

    def lower(self) -> "TracedText":
        return self._rewritten(super().lower())

    def capitalize(self) -> "TracedText":
        return self._rewritten(super().capitalize())

    def title(self) -> "TracedText":
        return self._rewritten(super().title())

    def _rewritten(self, text: str) -> "TracedText":
        """Return this text with changed characters. If its length changes, all get the first one's source."""
        return TracedText(text, self.sources if len(text) == len(self) else self.sources[:1] * len(text))


def source_mark(number: int) -> str:
    """Return the source of characters in string `number` of a record."""
    return chr(number + 1)


def char_sources(text: str) -> str:
    """Return the source of each character."""
    return text.sources if isinstance(text, TracedText) else TEMPLATE * len(text)


def joined(parts: Iterable[object]) -> str:
    """Concatenate the parts, with the sources of traced ones."""
    texts = [str(part) for part in parts]
    whole = "".join(texts)
    if not any(isinstance(text, TracedText) for text in texts):
        return whole
    return TracedText(whole, "".join(map(char_sources, texts)))


def traced_json(value: object, **options: Any) -> str:
    """Encode a value as JSON, with the sources of its strings."""
    strings: list[TracedText] = []
    if options.get("sort_keys"):
        options = {**options, "sort_keys": False}
        value = with_sorted_keys(value)
    text = json.dumps(hidden(value, strings), **options)

    parts: list[str] = []
    end = 0
    for match in PLACEHOLDER.finditer(text):
        parts += [text[end:match.start()], json_letters(strings[int(match[1] or match[2])], options)]
        end = match.end()
    return joined([*parts, text[end:]])


def json_letters(text: TracedText, options: dict[str, Any]) -> str:
    """Return the characters that JSON writes between the quotes of a string."""
    in_ascii = options.get("ensure_ascii", True)
    whole = json.dumps(str.__str__(text), ensure_ascii=in_ascii)[1:-1]
    if len(whole) == len(text):
        return TracedText(whole, text.sources)
    letters = [json.dumps(letter, ensure_ascii=in_ascii)[1:-1] for letter in str.__iter__(text)]
    sources = [source * len(letter) for letter, source in zip(letters, text.sources)]
    return TracedText("".join(letters), "".join(sources))


def hidden(value: object, strings: list[TracedText]) -> object:
    """Replace the traced strings in a value by placeholders, and append them to `strings`."""
    if isinstance(value, TracedText):
        strings.append(value)
        return f"\ue000{len(strings) - 1}\ue001"
    if isinstance(value, dict):
        return {hidden(key, strings): hidden(item, strings) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(item, strings) for item in value]
    return value


def with_sorted_keys(value: object) -> object:
    """Sort the keys of all objects in a value."""
    if isinstance(value, dict):
        return {key: with_sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [with_sorted_keys(item) for item in value]
    return value


# ---- templates ---------------------------------------------------------------------------------------------

class TracedMessage(dict):
    """A message as seen by a template. `number` counts from 0."""

    def __init__(self, message: dict[str, Any], number: int) -> None:
        super().__init__(message)
        self.number = number


class Piece(NamedTuple):
    """A part of a text written by one message."""
    start: int
    stop: int
    message: int | None  # message of the loop iteration that wrote it; None outside of loops
    is_marked: bool  # is it inside {% generation %}?


class TracedRender(NamedTuple):
    """The text written by a template, and where each part comes from."""
    text: str
    sources: str  # one per character
    pieces: tuple[Piece, ...]  # nonempty, in order
    has_marks: bool  # is there a {% generation %}, even if empty?


class Mark(NamedTuple):
    """The meaning of a mark between two NULs in a text."""
    loop: int | None = None  # over messages; None for a {% generation %}
    message: int | None = None  # whose iteration begins; None if the loop ends
    opens: int = 0  # change in open generations


def render(template: "jinja2.Template", variables: dict[str, Any]) -> TracedRender:
    """Render a template. Raises whatever it raises."""
    marks = {"[": Mark(opens=1), "]": Mark(opens=-1)}  # marks of loops are added as they begin
    context = template.new_context({**variables, MARKS: marks})
    texts: list[str] = []
    sources: list[str] = []
    pieces: list[Piece] = []
    owners: dict[int, int] = {}  # {loop: message} of open loops, innermost last
    message: int | None = None  # of the innermost loop
    open_marks = 0
    has_marks = False
    begin = length = 0  # of the current piece, and of the text

    def end_piece(piece_sources: str | None = None) -> None:
        """End a piece; `piece_sources` is None for text of the template."""
        nonlocal begin
        if length > begin:
            sources.append(piece_sources or TEMPLATE * (length - begin))
            pieces.append(Piece(begin, length, message, open_marks > 0))
            begin = length

    for chunk in template.root_render_func(context):
        if type(chunk) is str and "\0" not in chunk:  # most chunks are the template's
            texts.append(chunk)
            length += len(chunk)
            continue

        chunk_sources = char_sources(chunk)
        place = 0  # in the chunk
        for number, part in enumerate(MARK.split(chunk) if "\0" in chunk else (chunk,)):
            if number % 2:
                end_piece()
                place += len(part) + 2
                mark = marks[part]
                if mark.loop is None:
                    has_marks = True
                    open_marks += mark.opens
                    continue
                while mark.loop in owners:  # along with the loops inside it
                    owners.popitem()
                if mark.message is not None:
                    owners[mark.loop] = mark.message
                message = next(reversed(owners.values()), None)
            elif part:
                end_piece()
                texts.append(part)
                length += len(part)
                end_piece(chunk_sources[place:place + len(part)])
                place += len(part)
    end_piece()
    return TracedRender("".join(texts), "".join(sources), tuple(pieces), has_marks)


def loop_begins(context: "jinja2.runtime.Context", item: object, loop: int) -> str:
    """Return the mark for the start of an iteration, if the loop is over messages."""
    if not isinstance(item, TracedMessage):
        return ""
    name = f"{loop} {item.number}"
    context.parent[MARKS] |= {name: Mark(loop, item.number), f"{loop}": Mark(loop)}
    return f"\0{name}\0"


def loop_ends(context: "jinja2.runtime.Context", loop: int) -> str:
    """Return the mark for the end of a loop over messages."""
    return f"\0{loop}\0" if f"{loop}" in context.parent[MARKS] else ""


def traced_environment() -> "jinja2.Environment":
    """Make the environment of templates: without access to Python, with the functions they expect."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, marked in the text."""
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = [nodes.Output([nodes.TemplateData(f"\0{mark}\0")], lineno=line) for mark in "[]"]
            return [marks[0], *body, marks[1]]

    class Tracing(NodeTransformer):
        """Adds marks to loops, and makes ~ keep sources."""
        loops = 0

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            items = nodes.List(node.nodes, lineno=node.lineno)
            return nodes.Filter(items, "_traced_concat", [], [], None, None, lineno=node.lineno)

        def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:
            self.loops += 1
            number = self.loops
            self.generic_visit(node)
            if not isinstance(node.target, nodes.Name):
                return node
            line = node.lineno
            loop, item = nodes.Const(number), nodes.Name(node.target.name, "load")
            begins = nodes.Filter(item, "_traced_begin", [loop], [], None, None, lineno=line)
            ends = nodes.Filter(loop, "_traced_end", [], [], None, None, lineno=line)
            node.body.insert(0, nodes.Output([begins], lineno=line))
            return [node, nodes.Output([ends], lineno=line)]

    class TracedEnvironment(ImmutableSandboxedEnvironment):
        concat = staticmethod(joined)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            tree = Tracing().visit(tree)
            return tree.set_environment(self)

        def call(__self, __context: Any, __called: Any, *args: Any, **kwargs: Any) -> Any:
            of = getattr(__called, "__self__", None)
            if type(of) is str and getattr(__called, "__name__", "") in STR_METHODS:
                __called = getattr(TracedText(of, char_sources(of)), __called.__name__)
            return super().call(__context, __called, *args, **kwargs)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return traced_json(value, ensure_ascii=ensure_ascii, **options)

    def join_texts(values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = [made.getitem(value, attribute) for value in values]
        return TracedText(separator, char_sources(separator)).join(map(str, values))

    made = TracedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters.update(tojson=to_json, join=join_texts, _traced_concat=joined)
    made.filters.update(_traced_begin=jinja2.pass_context(loop_begins),
                        _traced_end=jinja2.pass_context(loop_ends))
    made.globals["raise_exception"] = refuse
    return made
