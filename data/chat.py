"""Conversations -> text, and the parts of it that the loss counts: what the assistant says.

A conversation is a list of messages, {"role", "content"} (OpenAI) or {"from", "value"} (ShareGPT). A
tokenizer folder with a chat template (chat_template.jinja, or tokenizer_config.json) writes it as
transformers' apply_chat_template does, to the token. Every other tokenizer gets a plain format:

    user: What is 2 + 2?
    assistant: 4

What an assistant's message adds to the text counts, from where the template invites it to speak
(add_generation_prompt) to the token that ends its turn; white space after that token does not. Where a
template marks {% generation %}, exactly what is inside counts.

A template may write a message in another way once others follow (Qwen3 drops earlier reasoning). Then the
turn is found by its content and by what the template writes after it.

A template is not told today's date (strftime_now): the same conversations give the same tokens on every day.

Source: transformers, utils/chat_template_utils.py, for the environment of a template.
"""
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from config import ConfigError, Tree
from data.tokenizer import CHAT_TEMPLATE, JsonTokenizer, Tokenizer

if TYPE_CHECKING:  # imported only where a conversation needs them
    import jinja2
    import tokenizers

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, stop) of a text

ASSISTANT = "assistant"
SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "chatgpt": ASSISTANT}
GENERATION_START, GENERATION_STOP = "\0[", "\0]"  # what {% generation %} writes around its content
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class BadConversation(ValueError):
    """A conversation that cannot be written as text. The message is the reason."""


class ChatText(NamedTuple):
    """A conversation as text."""
    text: str
    spans: tuple[Span, ...]  # the parts that the loss counts, in order


class EncodedChat(NamedTuple):
    """A conversation as token ids."""
    ids: np.ndarray  # [tokens]
    counted: np.ndarray  # bool [tokens]
    pieces: list[np.ndarray]  # the ids of each part that was encoded for itself, without an end
    texts: list[str]  # the text of each


# ---- messages ----------------------------------------------------------------------------------------------

def parse_messages(value: object) -> list[Message]:
    """The messages {"role", "content", ...} of a conversation. Raises BadConversation."""
    if not isinstance(value, list) or not value:
        raise BadConversation("holds no list of messages")
    messages = [parse_message(number, message) for number, message in enumerate(value, 1)]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise BadConversation(f"has no message of the {ASSISTANT}: nothing would count in the loss")
    return messages


def parse_message(number: int, message: object) -> Message:
    """One message, with its number from 1. Raises BadConversation."""
    if not isinstance(message, dict):
        raise BadConversation(f"message {number} is no object with role and content")
    if "role" in message:
        role, content = message["role"], message.get("content")
    else:
        role, content = message.get("from"), message.get("value")
        role = SHAREGPT_ROLES.get(str(role), role)
    if not isinstance(role, str) or not role:
        raise BadConversation(f"message {number} has no role (or from)")

    if isinstance(content, list) and all(is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str) or "\0" in content:
        raise BadConversation(f"message {number} ({role}) has no text under content (or value)")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": role, "content": content}


def is_text_part(part: object) -> bool:
    """Is this a part {"type": "text", "text": ...} of a message?"""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


# ---- formats -----------------------------------------------------------------------------------------------

class PlainChat:
    """The plain format. A conversation ends with the end-of-document token, which counts after an assistant's
    message."""

    def write(self, messages: list[Message]) -> ChatText:
        """The text of a conversation."""
        text = ""
        spans: list[Span] = []
        for message in messages:
            text += f"{message['role']}: "
            start = len(text)
            text += f"{message['content']}\n"
            if message["role"] == ASSISTANT:
                spans.append((start, len(text)))
        return ChatText(text, tuple(spans))

    def encode_batch(self, tok: Tokenizer, chats: list[ChatText]) -> list[EncodedChat]:
        """Encodes each part for itself, as a generation continues a prompt."""
        parts: list[str] = []
        is_counted: list[bool] = []
        part_counts: list[int] = []
        for chat in chats:
            found = list(parts_of(chat))
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
            result.append(EncodedChat(
                np.concatenate(ids, dtype=np.int32, casting="unsafe"),
                np.concatenate(masks),
                pieces=ids[:-1],
                texts=parts[begin:begin + count],
            ))
            begin += count
        return result


def parts_of(chat: ChatText) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, counts) of the parts of a text, in order; none is empty."""
    end = 0
    for start, stop in chat.spans:
        if start > end:
            yield end, start, False
        if stop > start:
            yield start, stop, True
        end = stop
    if end < len(chat.text):
        yield end, len(chat.text), False


@dataclass(frozen=True)
class TemplateChat:
    """The format of a chat template. Nothing is added to what it writes."""
    template: "jinja2.Template"
    names: dict[str, str]  # special tokens that a template may write: bos_token, ...
    processor: "tokenizers.Tokenizer"  # reads special tokens in a text as such
    control: tuple[str, ...]  # tokens that no text makes, but the template
    pairs: tuple[tuple[str, str], ...]  # those that the template reads around reasoning and calls: <x>, </x>

    def write(self, messages: list[Message]) -> ChatText:
        """The text of a conversation. Raises BadConversation if the template refuses it, if a message spells
        a control token, or if the text does not show where an assistant's turn begins and ends."""
        for number, message in enumerate(messages, 1):
            texts = list(strings_of(message))
            if message["role"] == ASSISTANT:
                texts = [self._without_pairs(text) for text in texts]
            spelled = [token for token in self.control if any(token in text for text in texts)]
            if spelled:
                raise BadConversation(f"message {number} ({message['role']}) spells the control token "
                                      f"{spelled[0]}, which only the chat template may write; take it "
                                      "out, or give reasoning as reasoning_content and calls as tool_calls")

        text = self._render(messages)
        if GENERATION_START in text:
            return marked_text(text)
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                after = spans[-1][1] if spans else 0
                spans.append(self._turn(messages, number, text=text, after=after))
        return ChatText(text, tuple(spans))

    def invite(self, messages: list[Message]) -> str:
        """The text of a conversation, up to where the assistant speaks. Raises BadConversation."""
        return self._render(messages, invites=True)

    def _without_pairs(self, text: str) -> str:
        """A text of the assistant's without the marks around reasoning and calls, if they stand in pairs."""
        for first, last in self.pairs:
            text = re.sub(f"{re.escape(first)}(.*?){re.escape(last)}", r"\1", text, flags=re.DOTALL)
        return text

    def _render(self, messages: list[Message], invites: bool = False) -> str:
        import jinja2  # only for a template

        try:
            return self.template.render(messages=messages, add_generation_prompt=invites, tools=None,
                                        documents=None, **self.names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise BadConversation(f"the chat template refuses it: {reason}") from None

    def _render_or_none(self, messages: list[Message], invites: bool = False) -> str | None:
        """The text of the first messages alone; none if the template refuses them."""
        try:
            return self._render(messages, invites)
        except BadConversation:
            return None

    def _turn(self, messages: list[Message], number: int, *, text: str, after: int) -> Span:
        """The part of `text` that the assistant's message adds; it begins at `after` or later."""
        content = messages[number]["content"].strip()

        # where it begins: after the invitation, or after what the earlier messages wrote
        start = -1
        for invites in (True, False):
            before = self._render_or_none(messages[:number], invites)
            if before is not None and text.startswith(before) and len(before) >= after:
                start = len(before)
                break

        # where it ends: where the next message begins
        whole = self._render_or_none(messages[:number + 1]) or text
        if start >= 0 and text.startswith(whole) and len(whole) > start:
            stop = len(whole)
        else:
            # later messages changed how this one is written: find its content, and what closes it
            closing = whole[whole.rindex(content) + len(content):] if content and content in whole else ""
            place = text.find(content + closing, max(start, after)) if closing else -1
            if place < 0:
                raise BadConversation(f"message {number + 1}: the chat template writes it in a way in which "
                                      "its turn cannot be found")
            start = place if start < 0 else start
            stop = place + len(content) + len(closing)

        # white space after the token that ends the turn belongs to nobody
        turn = text[start:stop]
        if not turn.rstrip().endswith(content):
            stop = start + len(turn.rstrip())
        return start, stop

    def encode_batch(self, tok: Tokenizer, chats: list[ChatText]) -> list[EncodedChat]:
        """Encodes whole conversations. A token counts if a part of its characters does."""
        texts = [chat.text for chat in chats]
        result: list[EncodedChat] = []
        for chat, encoding in zip(chats, self.processor.encode_batch(texts, add_special_tokens=False)):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            counted = np.zeros(len(offsets), bool)
            for start, stop in chat.spans:
                counted |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
            ids = np.array(encoding.ids, np.int32)
            result.append(EncodedChat(ids, counted, pieces=[ids], texts=[chat.text]))
        return result


def strings_of(value: object) -> Iterator[str]:
    """All strings in a message: of its content, reasoning, calls, names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_of(part)


def marked_text(text: str) -> ChatText:
    """The text without the marks of {% generation %}, and what was between them."""
    plain = ""
    spans: list[Span] = []
    for part in re.split(f"({re.escape(GENERATION_START)}.*?{re.escape(GENERATION_STOP)})", text, flags=re.S):
        start = len(plain)
        plain += part.removeprefix(GENERATION_START).removesuffix(GENERATION_STOP)
        if part.startswith(GENERATION_START):
            spans.append((start, len(plain)))
    return ChatText(plain, tuple(spans))


ChatFormat = PlainChat | TemplateChat


# ---- templates ---------------------------------------------------------------------------------------------

def chat_format(tok: Tokenizer | None) -> ChatFormat:
    """The format that belongs to a tokenizer; the plain one for none. Raises ConfigError if its template is
    not one."""
    if not isinstance(tok, JsonTokenizer):
        return PlainChat()
    source = template_source(tok.files)
    if source is None:
        return PlainChat()

    import jinja2
    import tokenizers

    try:
        template = environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"tokenizer {tok.name}: its chat template is not one ({error}); "
                          f"repair {CHAT_TEMPLATE}") from None
    processor = tokenizers.Tokenizer.from_str(tok.files["tokenizer.json"].decode("utf-8"))
    processor.no_padding()
    processor.no_truncation()
    control = [processor.id_to_token(number) for number in sorted(tok.contract.control)]
    closed = [(token, f"</{token[1:]}") for token in control if token.startswith("<")]
    pairs = [(first, last) for first, last in closed if last in control and last in source]
    return TemplateChat(
        template, special_names(tok.files), processor, control=tuple(control), pairs=tuple(pairs)
    )


def template_source(files: dict[str, bytes]) -> str | None:
    """The chat template among the files of a tokenizer; of several with names, `default`."""
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE].decode("utf-8")
    named = tokenizer_settings(files).get("chat_template")
    if isinstance(named, list):
        by_name = {entry["name"]: entry["template"] for entry in named}
        return by_name.get("default")
    return named


def special_names(files: dict[str, bytes]) -> dict[str, str]:
    """{bos_token: "<s>", ...}: what transformers gives to a template."""
    settings = tokenizer_settings(files)
    names: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            names[name] = token
    return names


def tokenizer_settings(files: dict[str, bytes]) -> Tree:
    """The content of tokenizer_config.json; {} if there is none."""
    return json.loads(files.get("tokenizer_config.json", b"{}"))


def environment() -> "jinja2.Environment":
    """Where a template runs: without access to Python, and with the functions that templates expect."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, with marks around it."""
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = [nodes.Output([nodes.TemplateData(mark)], lineno=line)
                     for mark in (GENERATION_START, GENERATION_STOP)]
            return [marks[0], *body, marks[1]]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    return made
