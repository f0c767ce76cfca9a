"""Parse records into conversations, in the formats in which they are published.

    OpenAI          messages: role, content (text, or parts of text), tool_calls, weight; also tools
    ShareGPT        conversations: from, value; also system, tools
    Hugging Face    prompt and completion, each text or messages; chosen, with or without prompt
    Alpaca          instruction, input, output; also system, history

Images, audio and video are refused. Keys that nothing here reads are reported (Conversation.unread).
"""
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from config import Tree

Message = dict[str, Any]

ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    "human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT,
    "observation": "tool", "function_response": "tool", "function_call": ASSISTANT,
}
MESSAGE_KEYS = ("messages", "conversations", "conversation")  # the first one present is read
WEIGHTS = ("weight", "loss", "train", "training", "train_on_turn")  # 0 or false: the message does not count
MASKED = "masked"  # torchtune's: 1 or true means it does not count
CONTENTS = ("content", "value")
REASONING = ("reasoning_content", "reasoning", "thinking")  # synonyms; a template reads one of them
TOOLS = ("tools", "functions")
CALLS = ("tool_calls", "function_call")
ARGUMENTS = ("arguments", "parameters")  # of a call; Llama says parameters
AROUND_CALL = ("id", "type", "index")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MESSAGE_READ = {"role", "from", *CONTENTS, "tool_call_id", *CALLS, *WEIGHTS, MASKED, *REASONING}
RESERVED = ("messages", "tools", "add_generation_prompt")  # always passed to a template
EMPTY = (None, "", [], {})


class BadConversation(ValueError):
    """A conversation that cannot be rendered as text. The message gives the reason."""


class DuplicateKey(BadConversation):
    """A JSON object has a duplicate key. The message gives the reason."""


@dataclass(frozen=True)
class Conversation:
    """The content of a record. `counts` says whether the loss counts each message. `settings` holds the
    template variables in chat_template_kwargs. `unread` lists keys of the record that nothing reads."""
    messages: list[Message]
    counts: list[bool]
    tools: list[Tree] | None = None
    settings: Tree | None = None
    unread: tuple[str, ...] = ()


def walk_path(record: Tree, path: str) -> list[tuple[Tree, str]]:
    """Return (object, field) for each step to the field named by `path`: a.b is field b of the object under
    a, unless the record has a field with that exact name."""
    way: list[tuple[Tree, str]] = []
    while path not in record:
        outer, _, rest = path.partition(".")
        inner = record.get(outer)
        if not rest or not isinstance(inner, dict):
            break
        way.append((record, outer))
        record, path = inner, rest
    return [*way, (record, path)]


def read_conversation(record: Tree, key: str | None = None) -> Conversation:
    """Parse the conversation of a record. `key` names its messages, or is a path to them (walk_path); tools
    and system are read next to them. Without a key, the format is detected. Raises BadConversation naming the
    field."""
    around: list[str] = []
    path = key
    if key is not None:
        *outer, (record, key) = walk_path(record, key)
        around = [name for holder, step in outer for name in unread_in(holder, {step})]
    key = key or next((name for name in MESSAGE_KEYS if name in record), None)
    for name in MEDIA:
        if record.get(name) not in EMPTY:
            raise BadConversation(f"{name!r} holds something other than text, and only text is read")

    if key is not None:
        if record.get(key) is None:
            raise BadConversation(f"no messages under {path or key!r} (see --jsonl-key)")
        messages, read = parse_messages(record[key], key), {key}
        prompt_size = 0
    elif "chosen" in record or "completion" in record:
        answer = "chosen" if "chosen" in record else "completion"
        prompt, answers = parse_side(record, "prompt", "user"), parse_side(record, answer, ASSISTANT)
        prompt_size = whole_prompt_size(prompt, answers, answer)
        messages = answers if prompt_size else [*prompt, *answers]
        prompt_size, read = prompt_size or len(prompt), {"prompt", answer}
    elif "instruction" in record and "output" in record:
        messages, read = alpaca_messages(record), {"instruction", "input", "output", "history"}
        prompt_size = 0
    else:
        raise BadConversation(f"no messages under {MESSAGE_KEYS[0]!r} or {', '.join(MESSAGE_KEYS[1:])}, no "
                              "prompt and completion, no instruction and output (see --jsonl-key)")

    system = record.get("system")
    if system not in EMPTY:
        if not isinstance(system, str):
            raise BadConversation("'system' is not text")
        first = messages[0]
        if first["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
            prompt_size += 1
        elif first["content"] != system:
            raise BadConversation("'system' and its first message are two system prompts; remove one")

    counts = [number >= prompt_size and message_counts(number + 1, message)
              for number, message in enumerate(messages)]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise BadConversation(f"{key or 'the record'!r} has no message of the {ASSISTANT}: "
                              "nothing would count in the loss")
    if not any(counts):
        raise BadConversation(f"no message of the {ASSISTANT} counts (weight, loss or train): "
                              "nothing would be trained")
    settings = parsed_json(record.get("chat_template_kwargs"))
    if settings not in EMPTY and not isinstance(settings, dict):
        raise BadConversation("'chat_template_kwargs' is not an object")
    for name in RESERVED:
        if settings and name in settings:
            raise BadConversation(f"'chat_template_kwargs' holds {name!r}, which is not a setting; write "
                                  "messages and tools beside it, or remove it")
    read |= {"system", "chat_template_kwargs", *TOOLS}
    unread = [*around, *unread_in(record, read)]
    return Conversation(messages, counts, parse_tools(record), settings or None, tuple(unread))


def unread_in(record: Tree, read: Collection[str]) -> list[str]:
    """Return the nonempty fields of a record that are not in `read`."""
    return [name for name, value in record.items() if name not in read and value not in EMPTY]


# ---- forms -------------------------------------------------------------------------------------------------

def parse_side(record: Tree, key: str, role: str) -> list[Message]:
    """Return the messages of `prompt`, `completion` or `chosen`; plain text becomes one message of `role`."""
    value = record.get(key)
    if value in EMPTY and key == "prompt":
        return []
    if isinstance(value, str):
        if key == "chosen" and record.get("prompt") in EMPTY:
            raise BadConversation("'chosen' is text, and there is no 'prompt' that it answers")
        return [{"role": role, "content": checked_text(value, repr(key))}]
    return parse_messages(value, key)


def whole_prompt_size(prompt: list[Message], answers: list[Message], key: str) -> int:
    """Return how many leading messages of the answers repeat the prompt, with or without a system message,
    else 0. Raises BadConversation if the answers begin with a question other than the prompt's."""
    if not prompt:
        return 0
    skipped = int(answers[0]["role"] == "system" != prompt[0]["role"])
    size = skipped + len(prompt)
    beginning = [{**message, "content": message["content"].strip()} for message in answers[skipped:size]]
    if beginning == [{**message, "content": message["content"].strip()} for message in prompt]:
        return size
    role = answers[0]["role"]
    if role not in (ASSISTANT, "tool"):
        raise BadConversation(f"{key!r} begins with {role}, so it is whole, and 'prompt' is not its "
                              "beginning; remove 'prompt', or what is not an answer")
    return 0


def alpaca_messages(record: Tree) -> list[Message]:
    """Return the messages of instruction, input and output, preceded by history (pairs of texts)."""
    messages: list[Message] = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadConversation("'history' is not a list of pairs of texts")
        question, answer = pair
        messages += [{"role": "user", "content": checked_text(question, "'history'")},
                     {"role": ASSISTANT, "content": checked_text(answer, "'history'")}]
    asked = [checked_text(record["instruction"], "'instruction'")]
    if record.get("input") not in EMPTY:
        asked.append(checked_text(record["input"], "'input'"))
    answer = checked_text(record["output"], "'output'")
    return [*messages, {"role": "user", "content": "\n".join(asked)}, {"role": ASSISTANT, "content": answer}]


def parse_messages(value: object, key: str = "messages") -> list[Message]:
    """Parse the messages {"role", "content", ...} under `key`. Raises BadConversation."""
    value = parsed_json(value)
    if not isinstance(value, list) or not value:
        raise BadConversation(f"{key!r} holds no list of messages")
    return [parse_message(number, message) for number, message in enumerate(value, 1)]


def parse_message(number: int, message: object) -> Message:
    """Parse message `number` (from 1): role, content, and its other fields. Raises BadConversation."""
    if not isinstance(message, dict):
        raise BadConversation(f"message {number} is not an object with role and content")
    if message.get("role") is not None:
        role, content = message["role"], message.get("content")
        role = "tool" if role == "function" else role
    else:
        written, content = message.get("from"), message.get("value")
        role = SHAREGPT_ROLES.get(str(written), written)
        if written == "function_call":
            message = {**message, "tool_calls": parsed_json(content)}
            content = ""
    if not isinstance(role, str) or not role:
        raise BadConversation(f"message {number} has no role (or from)")

    place = f"message {number} ({role})"
    if all(message.get(name) not in EMPTY for name in CALLS):
        raise BadConversation(f"{place} has {' and '.join(CALLS)}; keep one")
    contents = [message[name] for name in CONTENTS if message.get(name) not in EMPTY]
    if contents[1:] not in ([], contents[:1]):
        raise BadConversation(f"{place} has {' and '.join(CONTENTS)} that differ; keep one")
    calls = message.get("tool_calls") or message.get("function_call")
    if isinstance(content, list):
        content = "".join(text_of_part(part, place) for part in content)
    if content is None and (calls or any(message.get(name) for name in REASONING)):
        content = ""
    parsed = {"role": role, "content": checked_text(content, place)}
    if calls:
        parsed["tool_calls"] = parse_calls(calls, place)
    thoughts = [message[name] for name in REASONING if message.get(name) not in EMPTY]
    if thoughts:
        if any(thought != thoughts[0] for thought in thoughts):
            raise BadConversation(f"{place} has {' and '.join(REASONING)} that differ; keep one")
        parsed["reasoning_content"] = checked_text(thoughts[0], f"{place}: its reasoning_content")
    others = {name: value for name, value in message.items()
              if value not in EMPTY
              and (name not in MESSAGE_READ or name in ("tool_call_id", *WEIGHTS, MASKED))}
    return {**others, **parsed}


def checked_text(value: object, place: str) -> str:
    """Return `value`. Raises BadConversation if it is not text."""
    if not isinstance(value, str) or "\0" in value:
        raise BadConversation(f"{place} has no text under content (or value)")
    return value


def text_of_part(part: object, place: str) -> str:
    """Return the text of one content part. Raises BadConversation for images and audio."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part, dict):
        raise BadConversation(f"{place} holds {kind}, and only text is read")
    return checked_text(part.get("text"), place)


def message_counts(number: int, message: Message) -> bool:
    """Return whether the loss counts the message. Raises BadConversation for a weight other than 0 and 1."""
    is_assistant = message["role"] == ASSISTANT
    masked = message.pop(MASKED, 0)
    if masked not in (0, 1):
        raise BadConversation(f"message {number} ({message['role']}): its {MASKED} is {masked}; a message "
                              "counts (0, false) or not (1, true)")
    is_assistant = is_assistant and not masked
    for name in WEIGHTS:
        weight = message.pop(name, None)
        if weight is None:
            continue
        place = f"message {number} ({message['role']}): its {name}"
        if weight not in (0, 1):
            raise BadConversation(f"{place} is {weight}; a message counts (1, true) or not (0, false)")
        if weight and not is_assistant:
            raise BadConversation(f"{place} is {weight}, and only what the {ASSISTANT} says counts")
        is_assistant = is_assistant and bool(weight)
    return is_assistant


# ---- tools -------------------------------------------------------------------------------------------------

def parse_calls(value: object, place: str) -> list[Tree]:
    """Parse the calls of a message into {"type": "function", "function": {"name", "arguments"}}, arguments in
    JSON included. Raises BadConversation for a call with an unsupported key."""
    value = parsed_json(value)
    calls = value if isinstance(value, list) else [value]
    parsed: list[Tree] = []
    for call in calls:
        called = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            raise BadConversation(f"{place}: its tool_calls hold no name and arguments of a function")
        check_call_is_read(call, called, f"{place}: its tool_calls")
        written = next((called[name] for name in ARGUMENTS if called.get(name) not in EMPTY), {})
        arguments = parsed_json(written)
        around = {name: item for name, item in {**called, **call}.items() if name in ("id", "type")}
        function = {name: item for name, item in called.items() if name in ("name", "arguments")}
        function["arguments"] = {} if arguments in EMPTY else arguments
        parsed.append({"type": "function", **around, "function": function})
    return parsed


def check_call_is_read(call: Tree, called: Tree, place: str) -> None:
    """Raise BadConversation for an unsupported key. `called` is the function of the call, or the call."""
    if call is not called and (others := unread_in(call, {"function", *AROUND_CALL})):
        raise BadConversation(f"{place}: one holds {others[0]!r} beside its function, which is not read; "
                              "move it into the function, or remove it")
    if others := unread_in(called, {"name", *ARGUMENTS, *AROUND_CALL}):
        raise BadConversation(f"{place}: one holds {others[0]!r}, which is not read; "
                              "write a call as name and arguments")
    if len([name for name in ARGUMENTS if called.get(name) not in EMPTY]) > 1:
        raise BadConversation(f"{place}: one has {' and '.join(ARGUMENTS)}; keep one")


def parse_tools(record: Tree) -> list[Tree] | None:
    """Parse the tool definitions of a record into {"type": "function", "function": {...}}, or None."""
    named = [name for name in TOOLS if record.get(name) not in EMPTY]
    if not named:
        return None
    if len(named) > 1:
        raise BadConversation(f"{' and '.join(named)} both define tools; keep one")
    value = parsed_json(record[named[0]])
    if value in EMPTY:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadConversation(f"{named[0]!r} is not a list of definitions of tools")
    return [tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
            for tool in (without_nulls(tool) for tool in value)]


def parsed_json(value: object) -> Any:
    """Parse a string that holds a JSON object or list. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return parse_json(value)
        except DuplicateKey:
            raise
        except (ValueError, RecursionError):
            return value
    return value


def without_two_values(pairs: list[tuple[str, Any]]) -> Tree:
    """Build a JSON object. Raises DuplicateKey for a duplicate key: Python would drop a value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise DuplicateKey(f"an object has {key!r} twice, with two values; keep one")
    return found


JSON_SPACE = " \t\n\r"
JSON = json.JSONDecoder(object_pairs_hook=without_two_values)  # made once: it costs as much as a short record


def parse_json(text: str) -> Any:
    """Parse JSON. Raises DuplicateKey like without_two_values, and ValueError if it is not JSON."""
    text = text.strip(JSON_SPACE)
    value, end = JSON.raw_decode(text)
    return value if end == len(text) else JSON.decode(text)  # reports what is left over


def without_nulls(value: Any) -> Any:
    """Drop keys that hold null: parquet gives every object the union of all keys."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def walk_values(value: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Yield (path of keys, value) for each value in nested objects and lists. Object keys are included, as
    (..., "key")."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, "key"), key
            yield from walk_values(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from walk_values(item, path)
    else:
        yield path, value
