"""Streamed text is the text of all tokens, at a cost for each token that does not grow."""

import pytest

pytest.importorskip("transformers", minversion="5.23")

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fla_cp.train.streaming import LONGEST_WAIT, TextStream
from fla_cp.train.tokenizer import Tokenizer
from tests.support.tokenizers import save_tokenizer

TEXTS = [
    "The red fox sees 3 stones.",
    "\u00fcber \u20ac5 \u65e5\u672c\u8a9e \U0001f98a\U0001f600 e\u0301 \ufffd fox",
    " two  spaces\n and lines \U0001f469\u200d\U0001f680",
]


def save_pieces(folder):
    """A tokenizer like sentencepiece's: words begin with a mark, unknown characters are bytes."""
    words = ["<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581fox", "fox"]
    words += [chr(code) for code in range(33, 127)]
    model = models.BPE(
        vocab={word: n for n, word in enumerate(words)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    end = {"eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=library, **end).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module", params=["bpe", "pieces"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Tokenizer((save_tokenizer if request.param == "bpe" else save_pieces)(folder))


def pieces(stream, tokens):
    return [*(stream.add(token) for token in tokens), stream.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer, text):
    (tokens,) = tokenizer.ids([text])
    found = pieces(TextStream(tokenizer), tokens)
    assert "".join(found) == tokenizer.hf.decode(tokens)
    assert "".join(found).strip() == text.strip()
    assert "" in found[:-1] or text.isascii()  # parts of characters were held back
    assert all("\ufffd" not in piece for piece in found) or "\ufffd" in text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_text(text):
    assert "".join(pieces(TextStream(None), text.encode())) == text
    assert pieces(TextStream(None), [97, 300, 98]) == ["a", "", "b", ""]  # 300 is no byte


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_character_is_shown_at_the_end(tokenizer, cut):
    (tokens,) = tokenizer.ids(["fox \U0001f98a"])
    tokens = tokens[:-cut]
    found = pieces(TextStream(tokenizer), tokens)
    assert "".join(found) == tokenizer.hf.decode(tokens)
    assert found[-1].endswith("\ufffd")
    raw = "fox \U0001f98a".encode()[:-cut]
    assert "".join(pieces(TextStream(None), raw)) == raw.decode(errors="replace")


@pytest.mark.parametrize("count", [1, LONGEST_WAIT, 3 * LONGEST_WAIT + 1])
def test_special_tokens_show_nothing_and_lose_no_space(tokenizer, count):
    (tokens,) = tokenizer.ids(["fox fox"])
    half, silent = len(tokens) // 2, tokenizer.end[:1] * count
    assert silent
    given = [*silent, *tokens[:half], *silent, *tokens[half:], *silent]
    assert "".join(pieces(TextStream(tokenizer), given)) == "fox fox"
    assert tokenizer.hf.decode(given, skip_special_tokens=True) == "fox fox"


def test_decoded_tokens_grow_linearly(tokenizer, monkeypatch):
    """Also where no token ever completes a character."""
    for text in ("The red fox \u20ac. ", "\U0001f98a"):
        counts = {}
        for repeats in (40, 160):
            (tokens,) = tokenizer.ids([text * repeats])
            if text == "\U0001f98a":
                tokens = tokens[:1] * len(tokens)
            stream, decoded = TextStream(tokenizer), []
            decode = stream._decode

            def counted(window, decode=decode, decoded=decoded):
                decoded.append(len(window))
                return decode(window)

            monkeypatch.setattr(stream, "_decode", counted)
            assert "".join(pieces(stream, tokens)) == tokenizer.hf.decode(tokens)
            assert max(decoded) <= 2 * LONGEST_WAIT
            counts[repeats] = sum(decoded)
        assert counts[160] < 4.5 * counts[40]
