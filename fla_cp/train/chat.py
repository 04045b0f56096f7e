"""The tokens of a conversation, and those that the assistant wrote.

Only the assistant's tokens count as targets. Which ones these are is known exactly, or the
conversation is refused:

- A template that marks the assistant's text with `{% generation %}` blocks says it itself.
- For any other template, the conversation is rendered up to each of the assistant's messages, once
  before it, with the header that asks the assistant to write, and once after it. The tokens of both
  must be the first tokens of the whole conversation. What lies between them counts: the message,
  what the template puts behind it, such as an end-of-turn token, and before it whatever it does not
  write with `add_generation_prompt`. A template that rewrites earlier messages (Qwen3's puts an
  empty think block before the last answer alone), and a tokenizer that joins the end of a header
  with the begin of a message, break this rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fla_cp.train.tokenizer import Tokenizer

Message = dict[str, Any]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [n] of a conversation, and which of them count, bool [n].

    messages: at least one, each a dict with a role. name: what to call it in an error.
    Raises ValueError if the tokenizer has no chat template, the template fails, no message is the
    assistant's, or the assistant's tokens are not known exactly.
    """
    if not tokenizer.has_template:
        raise ValueError(
            f"{name} is a conversation, so the tokenizer must have a chat template, but "
            f"{tokenizer.folder} has none"
        )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"{name} must have a message of the role assistant, got none to train on")
    if GENERATION.search(tokenizer.hf.get_chat_template()):
        ids, counted = _by_blocks(tokenizer, messages, name)
    else:
        ids, counted = _by_prefixes(tokenizer, messages, turns, name)
    if not counted.any():
        raise ValueError(f"{name}: the template must render what the assistant says, got nothing")
    return ids, counted


def _by_blocks(
    tokenizer: Tokenizer, messages: Sequence[Message], name: str
) -> tuple[np.ndarray, np.ndarray]:
    if not tokenizer.hf.is_fast:  # transformers finds tokens of a text by their offsets
        raise ValueError(
            f"{name}: a template with generation blocks needs a tokenizer with a tokenizer.json, "
            f"but {tokenizer.folder} has none"
        )
    found = _applied(
        tokenizer,
        messages,
        name,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, counted = found["input_ids"], found["assistant_masks"]
    return np.array(ids, dtype=np.int64), np.array(counted, dtype=bool)


def _by_prefixes(
    tokenizer: Tokenizer, messages: Sequence[Message], turns: Sequence[int], name: str
) -> tuple[np.ndarray, np.ndarray]:
    if turns[0] == 0:
        raise ValueError(
            f"{name}: the first message must not be the assistant's where the chat template has no "
            "generation blocks"
        )
    texts = [_applied(tokenizer, messages, name, tokenize=False)]
    for i in turns:
        before, after = messages[:i], messages[: i + 1]
        texts.append(_applied(tokenizer, before, name, tokenize=False, add_generation_prompt=True))
        texts.append(_applied(tokenizer, after, name, tokenize=False))
    whole, *parts = tokenizer.ids(texts)
    counted = np.zeros(len(whole), dtype=bool)
    for i, before_ids, after_ids in zip(turns, parts[::2], parts[1::2], strict=True):
        for part in (before_ids, after_ids):
            if whole[: len(part)] != part:
                raise ValueError(
                    f"{name}: the tokens up to message {i} must be the first ones of the whole "
                    "conversation, and are not, so the assistant's tokens are not known (templates "
                    "such as Qwen3's write the last answer otherwise than those before); mark what "
                    "the assistant says in the chat template by {% generation %} blocks"
                )
        counted[len(before_ids) : len(after_ids)] = True
    return np.array(whole, dtype=np.int64), counted


def _applied(tokenizer: Tokenizer, messages: Sequence[Message], name: str, **options: Any) -> Any:
    try:
        return tokenizer.hf.apply_chat_template(list(messages), **options)
    except Exception as error:  # a template may raise whatever it likes
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{name}: the chat template fails: {reason}") from error
