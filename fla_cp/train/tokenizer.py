"""A tokenizer of a local folder, and the tokens of a document with those that count as targets.

A document has one of three forms:

    text          a string. Its tokens, then the end-of-document token; all count.
    instruction   a pair (prompt, completion). With a chat template it is a conversation of two
                  messages. Without one, the tokens of both strings one after the other, then the
                  end-of-document token; those of the prompt do not count.
    chat          a list of messages, as the tokenizer's chat template takes them; chat.py says
                  which tokens count.

transformers loads the tokenizer. Nothing is downloaded, and no code of the folder runs. A chat
template is a program as well, but transformers runs it in a sandbox.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fla_cp.integrations.safetensors_folder import check_is_folder

Form = Literal["text", "instruction", "chat"]

FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*chat_templates/*.jinja")
"""Files of a folder that may change its tokens."""


class Encoded(NamedTuple):
    """A document. tokens: int64 [n]. counted: bool [n], or None where all tokens count."""

    tokens: np.ndarray
    counted: np.ndarray | None


class Tokenizer:
    """The tokenizer that `transformers` saved in a folder; it is loaded when it is first used.

    folder: what `tokenizer.save_pretrained` wrote, or the folder of a model. Only the path is
    pickled, so a worker process loads the tokenizer itself.
    Raises ValueError if there is no folder, transformers is missing, it cannot load the files, or
    they have no vocabulary: for some models transformers then makes a tokenizer without tokens.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            check_is_folder(folder)
        except ValueError as error:
            raise ValueError(f"--tokenizer {error}") from None
        needs_extra("--tokenizer", "transformers")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of transformers."""
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers and the libraries below raise all kinds
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"--tokenizer: {self.folder} must hold a tokenizer that transformers loads without "
                f"running code of the folder, got {type(error).__name__}: {reason}"
            ) from error
        if found.get_vocab().keys() <= found.get_added_vocab().keys():
            raise ValueError(
                f"--tokenizer: {self.folder} must hold the vocabulary of a tokenizer, such as "
                f"tokenizer.json, got a {type(found).__name__} without one"
            )
        return found

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token, added tokens included."""
        return 1 + max(self.hf.get_vocab().values())

    @property
    def end(self) -> list[int]:
        """The end-of-document token; [] if the tokenizer has none."""
        return [] if self.hf.eos_token_id is None else [int(self.hf.eos_token_id)]

    @property
    def has_template(self) -> bool:
        return bool(self.hf.chat_template)

    @cached_property
    def digest(self) -> str:
        """A hash of the files and of the libraries' versions: equal digests give equal tokens."""
        import tokenizers
        import transformers

        total = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
        found = {file for pattern in FILES for file in self.folder.glob(pattern)}
        for file in sorted(file for file in found if file.is_file()):
            try:
                contents = file.read_bytes()
            except OSError as error:
                raise ValueError(f"--tokenizer: cannot read {file}: {error.strerror}") from error
            total.update(file.name.encode() + b"\0" + hashlib.sha256(contents).digest())
        return total.hexdigest()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without any that a tokenizer adds at its begin or end."""
        if not texts:
            return []
        found = self.hf(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [list(row) for row in found["input_ids"]]

    def encode(self, form: Form, documents: Sequence[Any], names: Sequence[str]) -> list[Encoded]:
        """The tokens of each document. names: what to call each in an error.

        Raises ValueError for a document that does not have the form, or that chat.py refuses.
        """
        for name, document in zip(names, documents, strict=True):
            _check_form(form, document, name)
        if form == "text":
            return [Encoded(_array(ids + self.end), None) for ids in self.ids(documents)]
        if form == "instruction" and not self.has_template:
            prompts = self.ids([prompt for prompt, _ in documents])
            completions = self.ids([completion for _, completion in documents])
            return [
                _after(prompt, completion + self.end)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        from fla_cp.train.chat import encode_chat

        if form == "instruction":
            roles = ("user", "assistant")
            documents = [
                [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]
                for pair in documents
            ]
        return [
            Encoded(*encode_chat(self, messages, name))
            for name, messages in zip(names, documents, strict=True)
        ]


def needs_extra(flag: str, *packages: str) -> None:
    """Raises ValueError if one of the packages, which the extra `hf` installs, is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"{flag} needs {', '.join(missing)}: pip install 'fla_cp[hf]'")


def _check_form(form: Form, document: Any, name: str) -> None:
    if form == "text":
        right, rule = isinstance(document, str), "a string"
    elif form == "instruction":
        right = len(document) == 2 and all(isinstance(text, str) for text in document)
        rule = "a prompt and a completion, both strings"
    else:
        right = isinstance(document, list) and bool(document)
        right = right and all(isinstance(m, dict) and m.get("role") for m in document)
        rule = "a list of messages, each with a role"
    if not right:
        shown = repr(document)
        raise ValueError(f"{name} must be {rule}, got {shown[:80]}{'..' * (len(shown) > 80)}")


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def _after(context: Sequence[int], targets: Sequence[int]) -> Encoded:
    """Both parts one after the other; only the second counts."""
    counted = np.repeat([False, True], [len(context), len(targets)])
    return Encoded(_array([*context, *targets]), counted)
