"""The text of tokens that come one by one, and the tokens of bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from fla_cp.train.config import UserError
from fla_cp.train.tokenizer import Tokenizer

LONGEST_WAIT = 16
"""After so many tokens, text is returned even if it ends in a replacement character."""

UNFINISHED = "\ufffd"
"""The replacement character, which stands for bytes that are no complete character."""


class TextStream:
    """Pieces of text for tokens that come one by one; without a tokenizer, bytes are tokens.

    A token may hold a part of a character, and what it decodes to may depend on the tokens before:
    some tokenizers drop the space in front of the first word. So each piece is the difference of
    two decoded windows. Both begin with the tokens of the piece before, and a piece ends where a
    character does. The work for a token thus does not grow with the text.
    All pieces together are the text of all tokens. If the tokens are not valid UTF-8, the number of
    replacement characters may differ.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.window: list[int] = []  # the tokens of the piece before, and those that wait
        self.given = 0  # of these, how many are in pieces
        self.prefix = ""  # the text of those

    def add(self, token: int) -> str:
        """The text that the token completes; "" while a character is incomplete."""
        if self.tokenizer is None:
            return self.bytes.decode(bytes([token])) if token < 256 else ""
        self.window.append(token)
        whole = self._decode(self.window)
        waits = len(whole) <= len(self.prefix) or whole.endswith(UNFINISHED)
        if waits and len(self.window) - self.given < LONGEST_WAIT:
            return ""
        if len(whole) <= len(self.prefix):  # tokens without a text, behind which a space counts
            del self.window[self.given :]
            return ""
        piece = whole[len(self.prefix) :]
        del self.window[: self.given]
        self.given, self.prefix = len(self.window), self._decode(self.window)
        return piece

    def end(self) -> str:
        """The text that was held back, after the last token."""
        if self.tokenizer is None:
            return self.bytes.decode(b"", final=True)
        piece = self._decode(self.window)[len(self.prefix) :]
        self.window, self.given, self.prefix = [], 0, ""
        return piece

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None
        text: str = self.tokenizer.hf.decode(tokens, skip_special_tokens=True)
        return text


def check_bytes(flag: str, text: Sequence[int], rows: int) -> None:
    """Raises UserError if a model without a tokenizer, with `rows` tokens, cannot read a text."""
    most = max(text, default=0)
    if most >= rows:
        raise UserError(
            f"{flag} must have bytes below {rows}, the tokens of the model, which has no "
            f"tokenizer, got {most}: models of synthetic and needle:LENGTH read no text; train on "
            "stdlib or text:PATH, or give tokens to fla_cp.train.generate.generate"
        )
