"""Render conversations as text, and find the spans that the loss counts: what the assistant says.

A tokenizer folder with a chat template (tokenizer_files.py) renders a conversation (conversation.py) exactly
as transformers' apply_chat_template does, token by token. Any other tokenizer gets a plain format:

    user: What is 2 + 2?
    assistant: 4

The template runs on strings that record their source (traced.py), so each part of the text is attributed to a
message. This guarantees four things for every template, however it looks ahead or rewrites:

    turn        Everything an assistant message adds counts, from the generation prompt
                (add_generation_prompt) to the token that ends the turn. White space after that token does
                not count; reasoning counts even if the generation prompt has already opened it. If a
                template marks {% generation %}, exactly the marked text counts.
    whole       Every content, tool definition and call is in the text, or the record is refused.
    plain       A control token spelled out in a message is encoded as plain text; the template's are not.
    alone       Text of other messages inside a turn (a tool's result) does not count.

Templates never see today's date (strftime_now), only --date, so the same conversations give the same tokens
on any day. A template that requires a date gets FIXED_DATE.
"""
import datetime
import itertools
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from config import ConfigError, Tree
from data import traced
from data.contract import TOKENIZER_CONFIG
from data.conversation import ASSISTANT, EMPTY, REASONING, BadConversation, Conversation, Message
from data.lengths import ByteCheck, byte_check, has_plain_offsets
from data.tokenizer import JsonTokenizer, Tokenizer
from data.tokenizer_files import CHAT_TEMPLATE, DEFAULT, WITH_TOOLS, ChatTemplate, find_templates
from data.traced import TracedMessage, TracedRender, TracedText

if TYPE_CHECKING:  # imported only if a conversation needs them
    import jinja2
    import tokenizers

Span = tuple[int, int]  # characters [start, stop) of a text
PlacedIds = tuple[list[np.ndarray], np.ndarray]  # chunks of ids, and the character span of each id, [n, 2]

FIXED_DATE = "2025-01-01"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
THOUGHTS = re.compile(r"</?think>")  # in a content: templates extract the reasoning in between
NOT_NOTED = ("its tool_calls", "its tool_call_id", "(tool): its name")  # many templates omit these
PROBE = "Zqx"  # a content that no template writes on its own
ROLE = re.compile(r"[\w.-]+")


class ChatText(NamedTuple):
    """A rendered conversation."""
    text: str
    spans: tuple[Span, ...]  # spans that the loss counts, in order
    cuts: tuple[int, ...] = ()  # where to cut the text, so that no content forms a control token
    turns: tuple[int, ...] = ()  # a user message after an answer: a long conversation may be cut here
    notes: tuple[str, ...] = ()  # for the report


class MissingContent(BadConversation):
    """The template drops some strings of the conversation; `strings` says how many."""

    def __init__(self, message: str, strings: int) -> None:
        super().__init__(message)
        self.strings = strings


def missing_strings(error: BadConversation) -> float:
    """Return how many strings a template drops, or infinity if it refuses the conversation."""
    return error.strings if isinstance(error, MissingContent) else float("inf")


class EncodedChat(NamedTuple):
    """A conversation as token ids."""
    ids: np.ndarray  # [tokens]
    counted: np.ndarray  # bool [tokens]
    turns: tuple[int, ...] = ()  # token positions where it may be cut
    # ids of each separately encoded part, without an end token, and the text of each
    pieces: tuple[np.ndarray, ...] = ()
    texts: tuple[str, ...] = ()


class Leaf(NamedTuple):
    """One string of a conversation. If `is_required`, the text must contain it."""
    text: str
    message: int | None  # message number; None for tool definitions and settings
    place: str  # for error messages
    is_required: bool
    is_value: bool = False  # a JSON number, true, false or null: templates write it without a trace


# ---- formats -----------------------------------------------------------------------------------------------

class PlainChat:
    """The plain format.
    A conversation ends with the end-of-document token, which counts after an assistant message."""

    def write(self, conversation: Conversation) -> ChatText:
        """Render a conversation. Raises BadConversation for tools, reasoning and settings."""
        if conversation.tools:
            raise BadConversation("the plain format cannot write its tools; use a tokenizer with a template")
        text = ""
        spans: list[Span] = []
        turns: list[int] = []
        notes = [f"{key!r} of messages is not read" for message in conversation.messages for key in message
                 if key not in ("role", "content")
                 and not f"({message['role']}): its {key}".endswith(NOT_NOTED)]
        notes += unread_settings(conversation.settings, (), "the plain format")
        asks = set(turn_messages(conversation.messages))
        for number, message in enumerate(conversation.messages):
            for key in ("tool_calls", *REASONING):
                if message.get(key):
                    place = f"message {number + 1} ({message['role']})"
                    raise BadConversation(f"{place}: the plain format cannot write its {key}; use a "
                                          "tokenizer with a template")
            if number in asks and spans and spans[-1][1] == len(text):
                turns.append(len(text))
            text += f"{message['role']}: "
            start = len(text)
            text += f"{message['content']}\n"
            if conversation.counts[number]:
                spans.append((start, len(text)))
        return ChatText(text, tuple(spans), turns=tuple(turns), notes=tuple(notes))

    def encode_batch(self, tok: Tokenizer, chats: list[ChatText]) -> list[EncodedChat]:
        """Encode each part separately, as generation continues a prompt."""
        parts: list[str] = []
        is_counted: list[bool] = []
        part_counts: list[int] = []
        for chat in chats:
            found = list(get_parts(chat))
            parts += [chat.text[start:stop] for start, stop, _ in found]
            is_counted += [counted for _, _, counted in found]
            part_counts.append(len(found))

        encoded = tok.encode_batch(parts)
        result: list[EncodedChat] = []
        begin = 0
        for chat, count in zip(chats, part_counts):
            ids = [*encoded[begin:begin + count], np.array([tok.eod])]
            ends_with_answer = bool(chat.spans) and chat.spans[-1][1] == len(chat.text)
            counted = [*is_counted[begin:begin + count], ends_with_answer]
            masks = [np.full(len(part), value) for part, value in zip(ids, counted)]
            places = np.cumsum([0, *map(len, ids)]).tolist()
            turns = [place for place, (start, _, _) in zip(places, get_parts(chat)) if start in chat.turns]
            result.append(EncodedChat(
                np.concatenate(ids, dtype=np.int32, casting="unsafe"),
                np.concatenate(masks),
                turns=tuple(turns),
                pieces=tuple(ids[:-1]),
                texts=tuple(parts[begin:begin + count]),
            ))
            begin += count
        return result


def get_parts(chat: ChatText) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, counts) for the nonempty parts of a text, in order."""
    end = 0
    for start, stop in chat.spans:
        if start > end:
            yield end, start, False
        if stop > start:
            yield start, stop, True
        end = stop
    if end < len(chat.text):
        yield end, len(chat.text), False


class Form(NamedTuple):
    """One of the input forms that templates expect for a conversation."""
    arguments_in_json: bool = False  # call arguments as a JSON string instead of an object
    content_in_parts: bool = False  # [{"type": "text", "text": ...}] instead of a string
    developer_is_system: bool = False


@dataclass(frozen=True)
class TemplateChat:
    """The format of a chat template, with nothing added to its output."""
    template: "jinja2.Template"
    names: Tree  # variables available to the template: bos_token, ...
    reads: frozenset[str]  # all names that the template uses
    tok: JsonTokenizer
    processor: "tokenizers.Tokenizer"  # has its own copy, which parses control tokens in a text
    control: re.Pattern[str] | None  # matches a control token in a text
    header: str = ""  # text written before the assistant speaks
    ends_turns: bool = True  # does it write a token after the assistant's text?
    date: str | None = None  # the date given to the template if it asks
    drops_reasoning: bool = False  # may it drop reasoning?
    pairs: tuple[tuple[str, str], ...] = ()  # control tokens <x>, </x> of reasoning and calls that it parses
    place: str = ""  # path of the template, for messages
    with_tools: "TemplateChat | None" = None  # renders conversations with tools
    is_for_tools: bool = False  # and only for them: there is no other template
    passed_over: tuple[str, ...] = ()  # template files that transformers ignores

    @cached_property
    def check(self) -> ByteCheck | None:
        """Byte check of the tokenizer, if the library would find the same characters."""
        return byte_check(self.tok, is_chat=True) if has_plain_offsets(self.tok) else None

    @property
    def places(self) -> str:
        """The files of its templates, and those that it ignores."""
        tools = f"; {self.with_tools.place} with tools" if self.with_tools else ""
        others = f"; transformers ignores {' and '.join(self.passed_over)}" if self.passed_over else ""
        return f"{self.place}{tools}{others}"

    def write(self, conversation: Conversation) -> ChatText:
        """Render a conversation. Raises BadConversation if the template refuses it in every form, drops a
        part of it, or does not show where an assistant turn begins and ends."""
        if conversation.tools and self.with_tools is not None:
            return self.with_tools.write(conversation)
        self._check_default(conversation.tools)
        unread = unread_settings(conversation.settings, self.reads, "the chat template")
        reason: BadConversation | None = None
        for form in candidate_forms(conversation):
            try:
                written = self._write(conversation, form)
                return written._replace(notes=(*unread, *written.notes))
            except BadConversation as error:
                # report the error of the form that drops the least
                if reason is None or missing_strings(error) < missing_strings(reason):
                    reason = error
        assert reason is not None
        raise reason

    def _write(self, conversation: Conversation, form: Form) -> ChatText:
        leaves: list[Leaf] = []
        messages = [traced_message(number, message, form, leaves)
                    for number, message in enumerate(conversation.messages)]
        tools = traced_tools(conversation.tools, leaves)
        settings = traced_settings(conversation.settings, leaves)
        for leaf in leaves:
            if "\0" in leaf.text:
                raise BadConversation(f"{leaf.place} holds a NUL, which is not text")
        made = self.render(messages, tools, settings)
        notes = check_whole(made, leaves, self.drops_reasoning)
        spoken = {traced.source_mark(index): self._paired_marks(leaf.text)
                  for index, leaf in enumerate(leaves) if is_answer(conversation, leaf)}
        cuts = self._cuts(made, spoken)
        if cuts:
            notes.append("control tokens spelled in messages are encoded as plain text")

        if not (self.ends_turns or made.has_marks):
            notes.append("a turn ends with the token that begins the next one: the last has no end")
        spans: list[Span] = []
        own = dict.fromkeys([None, *range(len(messages))], "")  # the sources of each message
        for index, leaf in enumerate(leaves):
            own[leaf.message] += traced.source_mark(index)
        for number, counts in enumerate(conversation.counts):
            if counts and made.has_marks:
                spans += marked_spans(made, number)
            elif counts:
                spans += self._turn(made, number, own)
        begins = {piece.message: piece.start for piece in reversed(made.pieces)}
        asks = turn_messages(conversation.messages)
        turns = sorted(begins[number] for number in asks if number in begins)
        return ChatText(made.text, tuple(spans), cuts, tuple(turns), tuple(notes))

    def render_turn_start(self, messages: list[Message]) -> str:
        """Render text messages up to the point where the assistant speaks. Raises BadConversation."""
        self._check_default(None)
        reason: BadConversation | None = None
        for in_parts in (False, True):  # some templates only read content as a list of parts
            seen: list[TracedMessage] = []
            for number, message in enumerate(messages):
                content = message["content"]
                parts = [{"type": "text", "text": content}]
                seen.append(TracedMessage({**message, "content": parts if in_parts else content}, number))
            try:
                text = self.render(seen, invites=True).text
            except BadConversation as error:
                reason = reason or error
                continue
            asked = [message["content"].strip() for message in messages if message["role"] != ASSISTANT]
            if all(content in text for content in asked):
                return text
        raise reason or BadConversation("the chat template leaves a message out")

    def _check_default(self, tools: list[Tree] | None) -> None:
        """Raise BadConversation if this template is only for conversations with tools, and there are none."""
        if self.is_for_tools and not tools:
            raise BadConversation(f"the tokenizer has no chat template called {DEFAULT}, and {self.place} is "
                                  f"for conversations with tools; write the other to {CHAT_TEMPLATE}")

    def render(self, messages: list[TracedMessage], tools: list[Any] | None = None,
               settings: Tree | None = None, invites: bool = False) -> TracedRender:
        """Render the template. Raises BadConversation if it refuses."""
        import jinja2  # only needed for templates

        variables = {**self.names, "messages": messages, "add_generation_prompt": invites, "tools": tools,
                     "documents": None, **(settings or {})}
        try:
            return traced.render(self.template, variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            reason = reason.replace("data.traced.TracedText", "str").replace("TracedText", "str")
            raise BadConversation(f"the chat template refuses it: {reason}") from None

    def _turn(self, made: TracedRender, number: int, own: dict[int | None, str]) -> list[Span]:
        """Return the spans of the text that the assistant says in message `number`. `own` maps each message,
        and None for text outside of messages, to its sources."""
        place = f"message {number + 1} ({ASSISTANT})"
        pieces = [piece for piece in made.pieces if piece.message == number]
        if not pieces:
            raise BadConversation(f"{place}: the chat template writes it outside of its loop over messages; "
                                  "mark it with {% generation %}")

        # start: after the role's header, unless it continues the turn of an earlier message
        start = pieces[0].start
        if made.text.startswith(self.header, start):
            start += len(self.header)

        # end: white space after the end-of-turn token belongs to no message
        stop = pieces[-1].stop
        ends = [made.sources.rfind(source, start, stop) + 1 for source in own[number]]
        said = max(ends, default=0) or start
        if made.text[said:stop].strip():
            stop = said + len(made.text[said:stop].rstrip())
        if not self.ends_turns and self.control is not None:
            # the token that begins the next turn ends this one
            blank = len(made.text[stop:]) - len(made.text[stop:].lstrip())
            next_token = self.control.match(made.text, stop + blank)
            stop = next_token.end() if next_token else stop

        not_others = f"{traced.TEMPLATE}{own[None]}{own[number]}"
        others = set(made.sources[pieces[0].start:pieces[-1].stop].strip(not_others)).difference(not_others)
        parts = [(max(piece.start, start), min(piece.stop, stop)) for piece in pieces
                 if not others or others.isdisjoint(made.sources[piece.start:piece.stop])]
        if stop > pieces[-1].stop:
            parts.append((pieces[-1].stop, stop))
        return merged(parts)

    def _paired_marks(self, text: str) -> set[str]:
        """Return the marks of reasoning and calls (<think>, </think>) that occur in a text only in pairs."""
        marks: set[str] = set()
        for first, last in self.pairs:
            rest = re.sub(f"{re.escape(first)}.*?{re.escape(last)}", "", text, flags=re.DOTALL)
            if first in text and first not in rest and last not in rest:
                marks |= {first, last}
        return marks

    def _cuts(self, made: TracedRender, spoken: dict[str, set[str]]) -> tuple[int, ...]:
        """Return cut positions inside control tokens spelled out in the record, after their first character.

        spoken: {source: control tokens that it may spell}.
        """
        cuts: list[int] = []
        place = 0
        while self.control is not None and (found := self.control.search(made.text, place)):
            sources = made.sources[found.start():found.end()].strip(traced.TEMPLATE)
            is_spelled = sources != "" and found[0] not in spoken.get(sources[0], ())
            place = found.start() + 1 if is_spelled else found.end()
            if is_spelled:
                cuts.append(place)
        return tuple(cuts)

    def encode_batch(self, tok: Tokenizer, chats: list[ChatText]) -> list[EncodedChat]:
        """Encode whole conversations. A token counts if any of its characters does."""
        whole = iter(self._encode_whole([chat.text for chat in chats if not chat.cuts]))
        result: list[EncodedChat] = []
        for chat in chats:
            pieces, places = self._encode_cut(chat) if chat.cuts else next(whole)
            counted = np.zeros(len(places), bool)
            for start, stop in chat.spans:
                counted |= (places[:, 0] < stop) & (places[:, 1] > start)
            turns = np.searchsorted(places[:, 0], chat.turns).tolist()
            result.append(EncodedChat(
                np.concatenate(pieces),
                counted,
                turns=tuple(turns),
                pieces=tuple(pieces),
                texts=tuple(chat.text[first:stop] for first, stop in between_cuts(chat)),
            ))
        return result

    def _encode_whole(self, texts: list[str]) -> Iterator[PlacedIds]:
        """Yield the ids of each text, with the character span of each id."""
        if self.check is None or not texts:
            yield from map(placed, self.processor.encode_batch(texts, add_special_tokens=False))
            return
        encodings = self.processor.encode_batch_fast(texts, add_special_tokens=False)
        pieces = [np.array(encoding.ids, np.int32) for encoding in encodings]
        places = self.check.characters([text.encode("utf-8") for text in texts], pieces)
        for text, ids, of_ids in zip(texts, pieces, places):
            if of_ids is None:
                yield placed(self.processor.encode(text, add_special_tokens=False))
            else:
                yield [ids], of_ids

    def _encode_cut(self, chat: ChatText) -> PlacedIds:
        """Encode each part between cuts. Return the ids, with the character span of each id."""
        pieces: list[np.ndarray] = []
        offsets: list[Span] = []
        newline = self.processor.encode("\n", add_special_tokens=False).ids
        for first, stop in between_cuts(chat):
            # some tokenizers prepend a space to a text, but not after a newline
            before = "\n" if first else ""
            encoding = self.processor.encode(before + chat.text[first:stop], add_special_tokens=False)
            skipped = len(newline) if before else 0
            if encoding.ids[:skipped] != (newline if before else []):
                encoding = self.processor.encode(chat.text[first:stop], add_special_tokens=False)
                before, skipped = "", 0
            shift = first - len(before)
            pieces.append(np.array(encoding.ids[skipped:], np.int32))
            offsets += [(begin + shift, end + shift) for begin, end in encoding.offsets[skipped:]]
        return pieces, pairs(offsets)


def placed(encoding: "tokenizers.Encoding") -> PlacedIds:
    """Return the ids of an encoding, with the character span of each."""
    return [np.array(encoding.ids, np.int32)], pairs(encoding.offsets)


def pairs(offsets: list[Span]) -> np.ndarray:
    """Return int64 [n, 2]. np.array is three times slower on a list of pairs."""
    return np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)


def between_cuts(chat: ChatText) -> Iterator[Span]:
    """Return the spans of a text that are encoded separately."""
    return itertools.pairwise((0, *chat.cuts, len(chat.text)))


def turn_messages(messages: list[Message]) -> list[int]:
    """Return the numbers of user messages that follow an answer."""
    return [number for number in range(1, len(messages))
            if messages[number]["role"] == "user" and messages[number - 1]["role"] in (ASSISTANT, "tool")]


def cut_at_turns(chat: EncodedChat, size: int) -> list[EncodedChat]:
    """Cut a conversation at user messages into parts as long as `size` tokens allow.
    A longer turn stays whole."""
    parts: list[EncodedChat] = []
    first = 0
    ends = [*chat.turns, len(chat.ids)]
    for end, following in zip(ends, [*ends[1:], None]):
        if end > first and (following is None or following - first > size):
            parts.append(EncodedChat(chat.ids[first:end], chat.counted[first:end]))
            first = end
    return parts


def merged(parts: list[Span]) -> list[Span]:
    """Drop empty spans and merge adjacent ones."""
    spans: list[Span] = []
    for start, stop in parts:
        if spans and start == spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, start)
        elif stop > start:
            spans.append((start, stop))
    return spans


def marked_spans(made: TracedRender, number: int) -> list[Span]:
    """Return the spans that the template marks in a message. Raises BadConversation if it marks none."""
    spans = merged([(piece.start, piece.stop) for piece in made.pieces
                    if piece.is_marked and piece.message == number])
    if not spans:
        raise BadConversation(f"message {number + 1} ({ASSISTANT}): the chat template marks others with "
                              "{% generation %}, and nothing of it")
    return spans


# ---- the strings of a conversation -------------------------------------------------------------------------

def candidate_forms(conversation: Conversation) -> Iterator[Form]:
    """Yield the forms to try, the most common first."""
    messages = conversation.messages
    has_calls = any(message.get("tool_calls") for message in messages)
    has_developer = any(message["role"] == "developer" for message in messages)
    choices = ((False, True) if has_calls else (False,), (False, True),
               (False, True) if has_developer else (False,))
    for choice in sorted(itertools.product(*choices), key=sum):
        yield Form(*choice)


def traced_message(number: int, message: Message, form: Form, leaves: list[Leaf]) -> TracedMessage:
    """Return the message as passed to a template, and append its strings to `leaves`."""
    role = message["role"]
    place = f"message {number + 1} ({role})"
    if not ROLE.fullmatch(role):
        raise BadConversation(f"{place}: a role is one word")

    def any_value(value: Any, key: str, is_required: bool) -> Any:
        return traced_value(value, Leaf("", number, f"{place}: its {key}", is_required), leaves)

    seen: Message = {"role": "system" if form.developer_is_system and role == "developer" else role}
    content = any_value(message["content"], "content", True)
    seen["content"] = [{"type": "text", "text": content}] if form.content_in_parts else content
    for key, value in message.items():
        if key == "tool_calls":
            seen[key] = [traced_call(call, form, any_value) for call in value]
        elif key in REASONING:
            seen |= dict.fromkeys(REASONING, any_value(value, key, True))
        elif key not in seen:
            seen[key] = any_value(value, key, False)
    return TracedMessage(seen, number)


def traced_value(value: Any, like: Leaf, leaves: list[Leaf]) -> Any:
    """Return a value as passed to a template. Append its strings to `leaves`, modeled on `like`."""
    if isinstance(value, str):
        leaves.append(Leaf(value, like.message, like.place, like.is_required))
        return TracedText(value, traced.source_mark(len(leaves) - 1) * len(value))
    if isinstance(value, dict):
        return {traced_value(key, like, leaves): traced_value(item, like, leaves)
                for key, item in value.items()}
    if isinstance(value, list):
        return [traced_value(item, like, leaves) for item in value]
    leaves.append(like._replace(text=json.dumps(value), is_value=True))
    return value


def traced_call(call: Tree, form: Form, any_value: Any) -> Tree:
    """Return a call as passed to a template."""
    function = call["function"]
    arguments = function["arguments"]
    if form.arguments_in_json and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    around = {key: any_value(value, "tool_calls", False) for key, value in call.items() if key != "function"}
    return {**around, "function": {
        **function,
        "name": any_value(function["name"], "tool_calls", True),
        "arguments": any_value(arguments, "tool_calls", True),
    }}


def traced_tools(tools: list[Tree] | None, leaves: list[Leaf]) -> list[Any] | None:
    """Return the tool definitions as passed to a template. Names, descriptions, choices and parameters are
    required; the rest of a schema (types, limits) is up to the template."""
    if tools is None:
        return None

    def convert_value(value: Any, key: str, parent: str) -> Any:
        if isinstance(value, str):
            is_required = key in ("name", "description", "enum") or parent == "properties" and key == ""
            leaves.append(Leaf(value, None, f"tools: {key or 'parameter'}", is_required))
            return TracedText(value, traced.source_mark(len(leaves) - 1) * len(value))
        if isinstance(value, dict):
            return {convert_value(name, "", key): convert_value(item, name, key)
                    for name, item in value.items()}
        if isinstance(value, list):
            return [convert_value(item, key, parent) for item in value]
        return value

    return [convert_value(tool, "tools", "") for tool in tools]


def traced_settings(settings: Tree | None, leaves: list[Leaf]) -> Tree | None:
    """Return the settings as passed to a template; text in them belongs to the record. A template branches
    on settings, so it does not have to write them."""
    if not settings:
        return settings

    def convert_value(value: Any, name: str) -> Any:
        if isinstance(value, str):
            leaves.append(Leaf(value, None, f"chat_template_kwargs: {name}", False))
            return TracedText(value, traced.source_mark(len(leaves) - 1) * len(value))
        if isinstance(value, dict):
            return {convert_value(key, name): convert_value(item, name) for key, item in value.items()}
        if isinstance(value, list):
            return [convert_value(item, name) for item in value]
        return value

    return {name: convert_value(value, name) for name, value in settings.items()}


def unread_settings(settings: Tree | None, reads: Collection[str], reader: str) -> list[str]:
    """Return notes on the settings that are not read. Raises BadConversation if an unread setting holds text,
    a list or an object."""
    notes: list[str] = []
    for name, value in (settings or {}).items():
        if name in reads or value in EMPTY:
            continue
        if isinstance(value, (str, list, dict)):
            raise BadConversation(f"{reader} does not read {name!r} of chat_template_kwargs; remove it")
        notes.append(f"{name!r} of chat_template_kwargs is not read")
    return notes


def check_whole(made: TracedRender, leaves: list[Leaf], drops_reasoning: bool = False) -> list[str]:
    """Raise MissingContent if the text lacks a required string. Return notes on everything else it lacks."""
    notes: list[str] = []
    reasons: list[str] = []
    thoughts: list[str] = []  # dropped reasoning
    for number, leaf in enumerate(leaves):
        text = written_from(made, traced.source_mark(number))
        for missing, is_thought in missing_parts(leaf, text, made.text):
            key = leaf.place.rpartition("its ")[2]
            if not leaf.is_required:
                if leaf.message is not None and not leaf.place.endswith(NOT_NOTED):
                    notes.append(f"{key!r} of messages is not read")
            elif is_thought:
                what = "" if key in REASONING else "reasoning "
                thoughts.append(f"{leaf.place} {what}{shortened(missing)} is left out by the chat template; "
                                "allow it with --drop-reasoning")
            else:
                reasons.append(f"{leaf.place} {shortened(missing)} is left out by the chat template")
    if thoughts and drops_reasoning:
        notes.append("reasoning is left out by the chat template")
        thoughts = []
    if reasons or thoughts:
        raise MissingContent([*reasons, *thoughts][0], len(reasons) + len(thoughts))
    return notes


def written_from(made: TracedRender, source: str) -> str:
    """Return all characters of the text that come from `source`, in order."""
    size = made.sources.count(source)
    if not size:
        return ""

    # most are written in one piece
    first = made.sources.find(source)
    if made.sources.startswith(source * size, first):
        return made.text[first : first + size]
    return "".join(char for char, mark in zip(made.text, made.sources) if mark == source)


def is_answer(conversation: Conversation, leaf: Leaf) -> bool:
    """Return whether a leaf is the content of an assistant message."""
    if leaf.message is None or not leaf.place.endswith("its content"):
        return False
    return conversation.messages[leaf.message]["role"] == ASSISTANT


def missing_parts(leaf: Leaf, written: str, text: str) -> list[tuple[str, bool]]:
    """Return the parts of a string that the text lacks, each with whether it is reasoning. `written` is what
    came from the string. White space at the ends may be lost, a part may be JSON-encoded, and text of tool
    definitions may change case."""
    if leaf.is_value:
        value = json.loads(leaf.text)
        is_found = leaf.is_required and (leaf.text in text or str(value) in text)
        return [] if is_found else [(leaf.text, False)]
    if leaf.text.strip() in written:
        return []
    missing: list[tuple[str, bool]] = []
    for part, is_thought in answer_parts(leaf):
        said = part.strip()
        forms = [said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1]]
        if leaf.message is None:
            written, forms = written.lower(), [form.lower() for form in forms]
        if not any(form in written for form in forms):
            missing.append((part, is_thought))
    return missing


def answer_parts(leaf: Leaf) -> Iterator[tuple[str, bool]]:
    """Split a string at reasoning marks, and yield each part with whether it is reasoning: the text between
    <think> and </think>, or before the first </think> if the generation prompt opens it."""
    marks = THOUGHTS.findall(leaf.text)
    is_reasoning = leaf.place.endswith(tuple(f"its {key}" for key in REASONING))
    is_said = leaf.place.endswith(f"({ASSISTANT}): its content")
    for part, before, after in zip(THOUGHTS.split(leaf.text), ["<think>", *marks], [*marks, ""]):
        yield part, is_reasoning or is_said and (before, after) == ("<think>", "</think>")


def shortened(text: str, size: int = 40) -> str:
    """Shorten and quote a string for a message."""
    return repr(text if len(text) <= size else text[:size - 3] + "...")


ChatFormat = PlainChat | TemplateChat


# ---- templates ---------------------------------------------------------------------------------------------

def chat_format(
    tok: Tokenizer | None, date: str | None = None, drops_reasoning: bool = False
) -> ChatFormat:
    """Return the format of a tokenizer, or the plain one for None. `date` is the year-month-day passed to a
    template. `drops_reasoning` allows a template to drop reasoning. Raises ConfigError if the chat template
    is invalid or the tokenizer has no tokenizer.json."""
    found = find_templates(tok.files) if tok is not None else None
    if tok is None or found is None or not found.by_name:
        return PlainChat()
    if not isinstance(tok, JsonTokenizer):
        raise ConfigError(f"tokenizer {tok.name}: has a chat template, which needs a tokenizer.json beside "
                          "it; save one with transformers' AutoTokenizer, or remove the template "
                          f"({', '.join(each.place for each in found.by_name.values())}) for the plain one")
    made = {name: template_chat(tok, found.by_name[name], date, drops_reasoning)
            for name in (DEFAULT, WITH_TOOLS) if name in found.by_name}
    if not made:
        places = " and ".join(each.place for each in found.by_name.values())
        raise ConfigError(f"tokenizer {tok.name}: has no chat template called {DEFAULT}, only {places}; "
                          f"write the intended one to {CHAT_TEMPLATE}")
    dates = [each.date for each in made.values() if each.date]
    if DEFAULT not in made:
        return replace(made[WITH_TOOLS], is_for_tools=True, passed_over=found.passed_over)
    return replace(made[DEFAULT], with_tools=made.get(WITH_TOOLS), date=next(iter(dates), None),
                   passed_over=found.passed_over)


def template_chat(
    tok: JsonTokenizer, source: ChatTemplate, date: str | None, drops_reasoning: bool
) -> TemplateChat:
    """Return the format of one template. Raises ConfigError if it is invalid."""
    import jinja2.meta
    import tokenizers

    environment = traced.traced_environment()
    text, place = source
    try:
        template = environment.from_string(text)
        reads = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateError as error:
        raise ConfigError(f"tokenizer {tok.name}: its chat template is invalid ({error}); "
                          f"repair {place}") from None
    processor = tokenizers.Tokenizer.from_str(tok.files["tokenizer.json"].decode("utf-8"))
    processor.no_padding()
    processor.no_truncation()

    names: Tree = dict(special_names(tok.files))
    asks_date = "strftime_now" in text
    if date is None and asks_date and not re.search(r"strftime_now\s+is\s+(not\s+)?defined", text):
        date = FIXED_DATE
    if date is not None and asks_date:
        names["strftime_now"] = parsed_date(date).strftime
    spelled = {processor.id_to_token(number) for number in tok.contract.control} - {None}
    longest_first = sorted(spelled, key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first))) if spelled else None
    closed = [(token, f"</{token[1:]}") for token in longest_first if token.startswith("<")]
    made = TemplateChat(
        template,
        names,
        frozenset(reads),
        tok,
        processor,
        control,
        date=date if asks_date else None,
        drops_reasoning=drops_reasoning,
        pairs=tuple((first, last) for first, last in closed if last in spelled and last in text),
        place=place,
    )
    return replace(made, header=generation_prompt(made), ends_turns=ends_turns(made))


def parsed_date(date: str) -> datetime.datetime:
    """Parse a date. Raises ConfigError if it is not year-month-day."""
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise ConfigError(f"--date: {date} is not a date; write it as {FIXED_DATE}") from None


def generation_prompt(chat: TemplateChat) -> str:
    """Return the generation prompt of the template, empty if it has none.
    Reasoning that it opens counts as the assistant's."""
    for silent in probes(chat, "user"):
        inviting = chat.render([TracedMessage(message, 0) for message in silent.messages], invites=True)
        if inviting.text.startswith(silent.made.text):
            tail = inviting.text[len(silent.made.text):]
        else:
            asked = [piece.stop for piece in inviting.pieces if piece.message == 0]
            tail = inviting.text[max(asked, default=0):]
        return THOUGHTS.split(tail)[0]
    return ""


def ends_turns(chat: TemplateChat) -> bool:
    """Return whether the template writes anything between the assistant's text and what comes next."""
    for probe in probes(chat, "user", ASSISTANT):
        said = [probe.made.text[piece.start:piece.stop] for piece in probe.made.pieces if piece.message == 1]
        return not said or not "".join(said).rstrip().endswith(PROBE)
    return True


class Probe(NamedTuple):
    """A small conversation rendered by the template."""
    messages: list[Message]
    made: TracedRender


def probes(chat: TemplateChat, *roles: str) -> Iterator[Probe]:
    """Render a conversation of these roles in each form that the template accepts."""
    for content in (PROBE, [{"type": "text", "text": PROBE}]):
        messages = [{"role": role, "content": content} for role in roles]
        try:
            made = chat.render([TracedMessage(message, number) for number, message in enumerate(messages)])
        except BadConversation:
            continue
        if made.text.count(PROBE) == len(roles):
            yield Probe(messages, made)


def special_names(files: dict[str, bytes]) -> dict[str, str]:
    """Return {bos_token: "<s>", image_token: "<img>", ...}, as transformers passes to a template.

    If the settings do not list the added tokens, special_tokens_map.json defines the standard names, and the
    settings define the model's custom names.
    """
    settings = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    of_map: Tree = {}
    if "added_tokens_decoder" not in settings:
        of_map = json.loads(files.get("special_tokens_map.json", b"{}"))

    own = {name: token for name, token in settings.items()
           if name.endswith("_token") and name not in SPECIAL_NAMES and isinstance(token, str)}
    for named in (settings.get("extra_special_tokens") or settings.get("additional_special_tokens"),
                  {} if own else settings.get("model_specific_special_tokens"),
                  of_map.get("extra_special_tokens")):
        own |= named if isinstance(named, dict) else {}
    names: dict[str, str] = {}
    for name, token in {**settings, **of_map, **own}.items():
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (name in own or name.endswith("_token")):
            names[name] = text
    return names
