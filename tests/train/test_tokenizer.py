"""Tokens of texts, instructions and conversations, and which of them count."""

import json
import pickle

import numpy as np
import pytest

import fla_cp.train.tokenizer
from fla_cp.train.tokenizer import Tokenizer
from tests.support.tokenizers import BLOCKS, FORGETFUL, PLAIN, save_tokenizer


def chat(*texts, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = [
    chat("The red fox?", "It sees é 2."),
    chat("The", " owl", "3", "stones\n", "again", "no"),
    [{"role": "system", "content": "Be old."}, *chat("The", "fox")],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    templates = {
        "blocks": BLOCKS,
        "plain": PLAIN,
        "forgetful": FORGETFUL,
        "failing": "{{ raise_exception('no roles here') }}",
        "silent": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "none": None,
    }
    return {name: save_tokenizer(root / name, each) for name, each in templates.items()}


def said(tokenizer, encoded):
    """The text of the tokens that count, and that of the others."""
    decode = tokenizer.hf.decode
    return [decode(encoded.tokens[encoded.counted == value]) for value in (True, False)]


def test_a_text_ends_with_the_end_token_and_nothing_else_is_added(folders):
    tokenizer = Tokenizer(folders["none"])
    encoded = tokenizer.encode("text", ["The red fox", "", "é"], ["a", "b", "c"])
    assert [e.tokens[-1] for e in encoded] == tokenizer.end * 3
    assert [tokenizer.hf.decode(e.tokens[:-1]) for e in encoded] == ["The red fox", "", "é"]
    assert all(e.counted is None and e.tokens.dtype == np.int64 for e in encoded)
    assert len(encoded[0].tokens) < len("The red fox")  # merges were learnt
    assert tokenizer.vocab_size == len(tokenizer.hf)


def test_a_tokenizer_without_an_end_token_adds_none(tmp_path):
    tokenizer = Tokenizer(save_tokenizer(tmp_path, eos=None))
    assert tokenizer.end == []
    (encoded,) = tokenizer.encode("text", ["The"], ["a"])
    assert tokenizer.hf.decode(encoded.tokens) == "The"


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_only_what_the_assistant_says_counts_by_either_way(folders, messages):
    found = []
    for name in ("blocks", "plain"):
        tokenizer = Tokenizer(folders[name])
        (encoded,) = tokenizer.encode("chat", [messages], ["row 0"])
        answers = [m["content"] + "<|end|>" for m in messages if m["role"] == "assistant"]
        others = [m["content"] for m in messages if m["role"] != "assistant"]
        counted, context = said(tokenizer, encoded)
        assert counted == "".join(answers)
        assert all(text in context for text in others)
        whole = tokenizer.hf.apply_chat_template(messages, tokenize=False)
        assert tokenizer.hf.decode(encoded.tokens) == whole
        found.append(encoded)
    assert np.array_equal(found[0].tokens, found[1].tokens)
    assert np.array_equal(found[0].counted, found[1].counted)


def test_a_prompt_does_not_count(folders):
    pair = ("The red", "fox")
    plain = Tokenizer(folders["none"])
    (encoded,) = plain.encode("instruction", [pair], ["row 0"])
    assert said(plain, encoded) == ["fox<|end|>", "The red"]
    with_template = Tokenizer(folders["blocks"])
    (encoded,) = with_template.encode("instruction", [pair], ["row 0"])
    (wanted,) = with_template.encode("chat", [chat(*pair)], ["row 0"])
    assert np.array_equal(encoded.tokens, wanted.tokens)
    assert said(with_template, encoded)[0] == "fox<|end|>"


@pytest.mark.parametrize(
    "folder, form, document, message",
    [
        (
            "forgetful",
            "chat",
            chat("a", "b", "c", "d"),
            "row 7: the tokens up to message 1 must be",
        ),
        ("plain", "chat", chat("b", roles=("assistant",)), "row 7: the first message must not be"),
        (
            "plain",
            "chat",
            chat("b", roles=("user",)),
            "row 7 must have a message of the role assis",
        ),
        ("failing", "chat", chat("a", "b"), "row 7: the chat template fails: no roles here"),
        ("silent", "chat", chat("a", "b"), "row 7: the template must render what the assistant"),
        ("none", "chat", chat("a", "b"), "row 7 is a conversation, so the tokenizer must have a"),
        ("blocks", "chat", [], r"row 7 must be a list of messages, each with a role, got \[\]"),
        (
            "blocks",
            "chat",
            [{"content": "a"}],
            "row 7 must be a list of messages, each with a role",
        ),
        ("blocks", "text", None, "row 7 must be a string, got None"),
        ("none", "instruction", ("a", None), "row 7 must be a prompt and a completion, both str"),
    ],
)
def test_what_cannot_be_told_exactly_is_refused(folders, folder, form, document, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(folders[folder]).encode(form, [document], ["row 7"])


def test_a_header_that_merges_with_the_answer_is_refused(tmp_path):
    """` fox` is one token, so a header that ends in a space does not stay as it was."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = Tokenizer(save_tokenizer(tmp_path, template))
    with pytest.raises(ValueError, match="the tokens up to message 1 must be the first ones"):
        tokenizer.encode("chat", [chat("a", "fox sees")], ["row 0"])


LAST_THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ SAID }}"
    "{% else %}{{ SAID }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's template: an empty think block before the last answer alone."""


def test_a_think_block_in_the_last_answer_alone_needs_generation_blocks(tmp_path):
    """The example of docs/training.md, in a template like Qwen3's."""
    content = "m.content + '<|im_end|>\n'"
    plain = Tokenizer(save_tokenizer(tmp_path / "plain", LAST_THINKS.replace("SAID", content)))
    plain.encode("chat", [chat("a", "b")], ["row 0"])
    with pytest.raises(ValueError, match=r"row 0: .* such as Qwen3's .* by {% generation %} block"):
        plain.encode("chat", [chat("a", "b", "c", "d")], ["row 0"])
    before, _, after = LAST_THINKS.partition("{{ SAID }}")
    block = "{%- generation -%}{{ " + content + " }}{%- endgeneration -%}"
    marked = before + block + after.replace("SAID", content)
    tokenizer = Tokenizer(save_tokenizer(tmp_path / "marked", marked))
    (encoded,) = tokenizer.encode("chat", [chat("a", "b", "c", "d")], ["row 0"])
    assert said(tokenizer, encoded)[0] == "b<|im_end|>\nd<|im_end|>\n"


def test_unusable_folders_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--tokenizer must be a folder, got 'nowhere'"):
        Tokenizer("nowhere")
    with pytest.raises(ValueError, match=f"--tokenizer: {tmp_path} must hold a tokenizer that tr"):
        Tokenizer(tmp_path).ids(["a"])
    monkeypatch.setattr(fla_cp.train.tokenizer, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"--tokenizer needs transformers: pip install 'fla_cp\[hf"
    ):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_a_model_without_the_files_of_its_tokenizer_is_refused(kind, tmp_path):
    """transformers then makes a tokenizer that has no tokens for any text."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    message = f"^--tokenizer: {tmp_path} must hold the vocabulary of a tokenizer, .* got a Qwen"
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path).ids(["The red fox"])
    with pytest.raises(ValueError, match=message):
        _ = Tokenizer(tmp_path).vocab_size


def test_code_in_the_folder_does_not_run(tmp_path):
    save_tokenizer(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="without running code of the folder"):
        Tokenizer(tmp_path).ids(["a"])
    assert not marker.exists()


def test_only_the_path_is_pickled_and_the_digest_follows_the_files(folders, tmp_path):
    tokenizer = Tokenizer(folders["blocks"])
    assert tokenizer.ids(["The red"])
    assert len(pickle.dumps(tokenizer)) < 400
    assert pickle.loads(pickle.dumps(tokenizer)).ids(["The"]) == tokenizer.ids(["The"])
    digests = {Tokenizer(folder).digest for folder in folders.values()}
    assert len(digests) == len(folders)
    assert Tokenizer(save_tokenizer(tmp_path)).digest == tokenizer.digest
