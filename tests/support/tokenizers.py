"""A small byte-level tokenizer with a chat template, built here: tests download nothing."""

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    f"The {a} {b} sees {n} stones." for a in ("red", "old") for b in ("fox", "owl") for n in "123"
]
"""What the merges are learnt from."""

BLOCKS = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A template that marks what the assistant says."""

PLAIN = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without the marks."""

FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '..' }}")
"""A template that shortens all messages but the last."""

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save_tokenizer(folder, template=BLOCKS, eos="<|end|>", merges=120):
    """Writes a tokenizer into a folder and returns it. template, eos: None for none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + merges,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder
