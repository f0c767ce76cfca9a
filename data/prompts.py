"""Encode texts by role, for all model inputs: samples, generation, tasks.

    document    text that begins a document: the start token, if the model has one, and the text
    prompt      the same for a text to be continued: never empty
    chat        messages, in the tokenizer's format (chat.py), up to where the assistant speaks

Start token (BOS). A tokenizer's files say whether one is prepended to text: the post-processor of a
tokenizer.json, as transformers 5 interprets it, or add_bos_token in the tokenizer_config.json next to a
sentencepiece model. data.bos overrides them. Training data is read with the same token (start_tokens.py). A
chat template writes its own start token.

Control tokens. Text that spells a control token is plain text, as in training data. With `special` it becomes
the control token, as in transformers. In a chat, the template's tokens are control tokens, and those spelled
in messages are text. Assistant answers keep marks that are not flagged special, such as </think>: the model
has written them as tokens.
"""
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from config import ConfigError
from data.chat import ChatFormat, ChatText, TemplateChat, chat_format, get_parts
from data.contract import TOKENIZER_CONFIG, SpecialToken
from data.conversation import ASSISTANT, BadConversation, Conversation, Message
from data.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer

if TYPE_CHECKING:  # imported only for a tokenizer.json
    import tokenizers

USER, SYSTEM = "user", "system"
PLAIN_STOP = f"\n{USER}: "  # follows an answer in the plain format
PROBE = "0"  # an answer that no template changes
GUARD = "\U0010fffd"  # inserted into a spelled control token, so that it is not parsed
FIRST_STAND_IN = 0xf0000  # private-use characters, one for each control token


# ---- the start token ---------------------------------------------------------------------------------------

def start_token(tok: Tokenizer, wanted: bool | None) -> SpecialToken | None:
    """Return the token that begins a document, or None. `wanted` is data.bos; None follows the files.

    Raises ConfigError if a start token is wanted and the tokenizer names none, or if its post-processor puts
    several tokens before a text.
    """
    if wanted is False:
        return None
    added = added_start(tok)
    if added is not None or wanted is None:
        return added
    if tok.contract.start is None:
        fix_hint = f"name it as bos_token in {TOKENIZER_CONFIG} beside the tokenizer, or leave data.bos out"
        if not isinstance(tok, JsonTokenizer):  # no file next to it can name one
            fix_hint = "leave data.bos out, or prepare the data with a tokenizer that has one, such as bpe-N"
        raise ConfigError(f"data.bos: the tokenizer {tok.name} names no start token; {fix_hint}")
    return replace(tok.contract.start, named_by=("data.bos",))


def begins_with_start(tok: Tokenizer) -> bool | None:
    """Return whether the tokenizer's files put a start token before a document, None if the run has to choose
    with data.bos."""
    try:
        return start_token(tok, None) is not None
    except ConfigError:
        return None


def added_start(tok: Tokenizer) -> SpecialToken | None:
    """Return the token that the tokenizer's files put before a text.
    Raises ConfigError if there are several."""
    if isinstance(tok, SentencePieceTokenizer):
        start = tok.contract.start
        adds_start = json.loads(tok.files.get(TOKENIZER_CONFIG, b"{}")).get("add_bos_token")
        return replace(start, named_by=(TOKENIZER_CONFIG,)) if adds_start and start else None
    if not isinstance(tok, JsonTokenizer):
        return None

    encoding = tok.processor.encode("a", add_special_tokens=True)
    count = (*encoding.special_tokens_mask, 0).index(0)
    if count > 1:
        raise ConfigError(f"data.bos: tokenizer.json puts {count} tokens before a text "
                          f"({' '.join(encoding.tokens[:count])}), and here a document begins with one at "
                          "most; data.bos false puts none")
    return SpecialToken(encoding.ids[0], encoding.tokens[0], ("tokenizer.json",)) if count else None


# ---- prompts -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Prompts:
    """Encodes texts for a model (open_prompts). `start` begins documents, if the model uses one."""
    tok: Tokenizer
    start: SpecialToken | None = None

    @property
    def before_text(self) -> int:
        """The id that precedes the first token of a document: the start token, else the end token."""
        return self.start.id if self.start else self.tok.eod

    def document(self, text: str, special: bool = False) -> list[int]:
        """Encode a text that begins a document. With `special`, control tokens that it spells are parsed, and
        a start token among them is not doubled. Raises ConfigError if the tokenizer cannot parse them."""
        ids = self._control.encode(text) if special else self.tok.encode(text)
        if self.start is None or (special and ids[:1] == [self.start.id]):
            return ids
        return [self.start.id, *ids]

    def prompt(self, text: str, special: bool = False) -> list[int]:
        """Encode a text to be continued, as at least one id. `special` works as in `document`."""
        return self.document(text, special) or [self.tok.eod]

    def chat(self, messages: list[Message]) -> list[int]:
        """Encode a conversation {"role", "content"} up to where the assistant speaks.

        Raises ConfigError if the template refuses it.
        """
        if isinstance(self.format, TemplateChat):
            guarded = [self._guarded(message) for message in messages]
            try:
                text = self.format.render_turn_start(guarded)
            except BadConversation as error:
                raise ConfigError(f"the conversation: {error}") from None
            return self._control.encode(text)

        # plain format, in the parts used for training
        try:
            chat = self.format.write(make_conversation(messages))
        except BadConversation as error:
            raise ConfigError(f"the conversation: {error}") from None
        invited = ChatText(f"{chat.text}{ASSISTANT}: ", chat.spans)
        parts = [invited.text[begin:stop] for begin, stop, _ in get_parts(invited)]
        ids = np.concatenate(self.tok.encode_batch(parts)).tolist()
        return ids if self.start is None else [self.start.id, *ids]

    def shown(self, ids: list[int]) -> str:
        """Decode ids with their control tokens, if the tokenizer has names for them."""
        if isinstance(self.tok, JsonTokenizer):
            return self.tok.processor.decode(ids, skip_special_tokens=False)
        return self.tok.decode(ids)

    def spelled(self, text: str) -> list[str]:
        """Return the control tokens spelled in a text."""
        if not isinstance(self.tok, JsonTokenizer):
            return []
        return [match[0] for match in self._control.pattern.finditer(text)]

    def count_unknown(self, ids: list[int]) -> int:
        """Count the ids that stand for text unknown to the tokenizer."""
        unknown = self.tok.contract.unknown
        return 0 if unknown is None else ids.count(unknown)

    def unknown_texts(self, text: str) -> list[str]:
        """Return the parts of a text, in order, that the tokenizer does not know."""
        if isinstance(self.tok, JsonTokenizer):
            encoding = self.tok.processor.encode(text, add_special_tokens=False)
            parts = zip(encoding.ids, (text[begin:end] for begin, end in encoding.offsets))
        elif isinstance(self.tok, SentencePieceTokenizer):
            encode = self.tok.processor.encode  # an unknown piece is the text itself
            parts = zip(encode(text, out_type=int), encode(text, out_type=str))
        else:
            return []
        return [part for token_id, part in parts if token_id == self.tok.contract.unknown]

    # ---- where a text ends ---------------------------------------------------------------------------------

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids that end a generated text: end of document, and those in generation_config.json."""
        files = getattr(self.tok, "files", {})
        named = json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id")
        several = named if isinstance(named, list) else [named]
        return frozenset({self.tok.eod, *(each for each in several if isinstance(each, int))})

    @cached_property
    def turn_stops(self) -> frozenset[int]:
        """Ids that end an answer in a chat: `stops`, and the control token that the template appends."""
        if not isinstance(self.format, TemplateChat):
            return self.stops
        try:
            probe = [{"role": USER, "content": PROBE}, {"role": ASSISTANT, "content": PROBE}]
            chat = self.format.write(make_conversation(probe))
        except BadConversation:
            return self.stops
        closing = chat.text[slice(*chat.spans[-1])].rpartition(PROBE)[2] if chat.spans else ""
        control = self.tok.contract.control
        ends = [token_id for token_id in self._control.encode(closing) if token_id in control]
        return self.stops | set(ends[:1])

    @property
    def stop_text(self) -> str | None:
        """The text that ends an answer in a chat, or None if only ids do."""
        return None if isinstance(self.format, TemplateChat) else PLAIN_STOP

    # ---- parts ---------------------------------------------------------------------------------------------

    @cached_property
    def format(self) -> ChatFormat:
        return chat_format(self.tok)

    @cached_property
    def _control(self) -> "ControlReader":
        if not isinstance(self.tok, JsonTokenizer):
            raise ConfigError(f"--special: text spells no control token of the tokenizer {self.tok.name}, "
                              "which is not a tokenizer.json; leave it out")
        return control_reader(self.tok)

    def _guarded(self, message: Message) -> Message:
        """Return the message with a guard in each control token that it spells."""
        reader = self._control
        pattern = reader.special if message["role"] == ASSISTANT else reader.pattern
        content = pattern.sub(lambda match: f"{match[0][:1]}{GUARD}{match[0][1:]}", message["content"])
        return {**message, "content": content}


def make_conversation(messages: list[Message]) -> Conversation:
    """Make a conversation in which every answer counts."""
    return Conversation(messages, counts=[message["role"] == ASSISTANT for message in messages])


def open_prompts(tok: Tokenizer, bos: bool | None) -> Prompts:
    """Make the prompts of a model from data.bos. Raises ConfigError like start_token."""
    return Prompts(tok, start_token(tok, bos))


# ---- control tokens in a text ------------------------------------------------------------------------------

@dataclass(frozen=True)
class ControlReader:
    """Encodes a text and parses its control tokens, except those with a guard in them.

    processor: a tokenizer that treats control tokens as text; each has a one-character stand-in token
    instead.
    pattern: matches all control tokens; special: those flagged as special. stand_ins: of each.
    ids: the token that each stand-in stands for. cuts: whether spelled text would produce a token, and is cut
    at the guards.
    """
    processor: "tokenizers.Tokenizer"
    pattern: re.Pattern[str]
    special: re.Pattern[str]
    stand_ins: dict[str, str]
    ids: dict[int, int]
    cuts: bool

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises ConfigError if it contains a character that is used as a stand-in."""
        if any(stand_in in text for stand_in in self.stand_ins.values()):
            raise ConfigError("the prompt holds a character for private use, U+F0000 or one behind it, which "
                              "stands for a control token; remove it")
        replaced = self.pattern.sub(lambda match: self.stand_ins[match[0]], text)
        parts = replaced.split(GUARD) if self.cuts else [replaced.replace(GUARD, "")]
        encodings = self.processor.encode_batch(parts, add_special_tokens=False)
        return [self.ids.get(token_id, token_id) for encoding in encodings for token_id in encoding.ids]


def control_reader(tok: JsonTokenizer) -> ControlReader:
    """Make the reader of a tokenizer's control tokens."""
    import tokenizers

    processor = tokenizers.Tokenizer.from_str(tok.processor.to_str())
    processor.encode_special_tokens = True
    added = processor.get_added_tokens_decoder()
    texts = {number: processor.id_to_token(number) for number in sorted(tok.contract.control)}

    stand_ins = {text: chr(FIRST_STAND_IN + place) for place, text in enumerate(texts.values())}
    for number, text in texts.items():
        like = added.get(number)
        processor.add_tokens([tokenizers.AddedToken(
            stand_ins[text],
            single_word=like.single_word if like else False,
            lstrip=like.lstrip if like else False,
            rstrip=like.rstrip if like else False,
            normalized=like.normalized if like else False,
            special=False,
        )])
    ids = {processor.token_to_id(stand_ins[text]): number for number, text in texts.items()}
    return ControlReader(
        processor=processor,
        pattern=match_any(texts.values()),
        special=match_any(texts[number] for number in tok.hidden & texts.keys()),
        stand_ins=stand_ins,
        ids=ids,
        cuts=tok.words is not None,
    )


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches the texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
