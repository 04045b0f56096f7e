"""Documents for a tokenizer: text files in pieces, rows by their columns, and what is held out."""

import json
import pickle
import re

import numpy as np
import pytest

import fla_cp.train.documents
from fla_cp.train.documents import RowDocuments, TextDocuments
from fla_cp.train.sources import _bytes
from fla_cp.train.text_files import text_files
from tests.support.tokenizers import TEXT

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def texts(path, split):
    documents = TextDocuments(text_files(path)[0], split)
    found, names = documents.read(range(len(documents)))
    assert len(names) == len(found)
    assert documents.size == sum(len(text.encode()) for text in found)
    return found


def rows(path, split, cache, column=None):
    documents = RowDocuments(path, column, split, cache)
    return documents.read(range(len(documents)))[0]


def write_jsonl(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_long_files_are_cut_behind_line_ends_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(fla_cp.train.documents, "PIECE_BYTES", 100)
    lines = "".join(f"{i} {'ä' * (i % 30)}\n" for i in range(100))
    unbroken = "äöü€" * 100
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "unbroken.txt").write_text(unbroken)
    found = texts(tmp_path, None)
    assert "".join(found) == lines + unbroken
    assert len(found) > 30 and "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    of_lines = [text for text in found if "\n" in text]
    assert all(text.endswith("\n") for text in of_lines)
    assert all(len(text.encode()) < 300 for text in found)


def test_a_file_alone_holds_out_its_tail_and_files_hold_out_files(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i}\n" for i in range(1000)))
    train, valid = texts(book, "train"), texts(book, "valid")
    assert "".join(train + valid) == book.read_text()
    assert 0.02 < len(valid[0]) / len(train[0]) < 0.04 and train[0].endswith("\n")
    many = tmp_path / "many"
    many.mkdir()
    for i in range(200):
        (many / f"{i}.txt").write_text(f"file {i}")
    train, valid = texts(many, "train"), texts(many, "valid")
    assert sorted(train + valid) == sorted(f"file {i}" for i in range(200))
    assert 1 <= len(valid) <= 20
    book.write_text("line\n" * 9 + "ä" * 1000)  # the last line is longer than the tail
    train, valid = texts(book, "train"), texts(book, "valid")
    assert "".join(train + valid) == book.read_text() and 28 <= len(valid[0]) <= 31
    (tmp_path / "one.txt").write_text("one line")
    with pytest.raises(ValueError, match="text: the valid split must have text, got none"):
        texts(tmp_path / "one.txt", "valid")


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    assert TextDocuments(text_files(tmp_path)[0], None).read([0])[0] == [
        "a\N{REPLACEMENT CHARACTER}b"
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """The file becomes a folder, because a superuser may read every file."""
    (tmp_path / "a.txt").write_text("a")
    files, _ = text_files(tmp_path)
    documents = TextDocuments(files, None)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    message = f"text: cannot read {tmp_path / 'a.txt'}: Is a directory"
    for read in (
        lambda: documents.read([0]),
        lambda: TextDocuments(files, "train"),
        lambda: _bytes(files),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read()


@pytest.mark.parametrize(
    "names, train, valid",
    [
        (("train", "validation", "test"), [0], 1),
        (("test", "train"), [1], 0),
        (("train-00000-of-00002", "train-00001-of-00002", "valid-00000-of-00001"), [0, 1], 2),
        (("test-00000-of-00001-a09b74b3ef9c3b56", "Train_0", "train_1"), [1, 2], 0),
        (("train-00000-of-00002", "train-00001-of-00002"), [0, 1], None),
        (("a", "trained", "testing"), [0, 1, 2], None),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_that_are_named_after_splits_are_splits(kind, names, train, valid, tmp_path):
    """As many rows in each, of which the tokens of one split must not serve for another one."""
    texts = {i: [f"{i} {j}" for j in range(40)] for i in range(len(names))}
    for i, name in enumerate(names):
        table = datasets.Dataset.from_dict({"text": texts[i]})
        write = table.to_parquet if kind == "parquet" else table.to_json
        write(str(tmp_path / f"{name}.{kind}"))
    found = {split: rows(tmp_path, split, tmp_path / "cache") for split in ("train", "valid", None)}
    wanted = [text for i in train for text in texts[i]]
    if valid is None:
        assert sorted(found["train"] + found["valid"]) == sorted(wanted) and found["valid"]
        assert sorted(found[None]) == sorted(wanted)
    else:
        assert found == {"train": wanted, "valid": texts[valid], None: wanted}
    digests = [
        RowDocuments(tmp_path, None, split, tmp_path / "cache").digest
        for split in ("train", "valid")
    ]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "names, message",
    [
        (
            ("train", "val"),
            "must all be named after splits .*, or none .*train.jsonl and val.jsonl",
        ),
        (("books", "test"), "must all be named after splits .*, got test.jsonl and books.jsonl"),
        (("test", "validation"), "must have a split named train, got test, validation"),
    ],
)
def test_unclear_splits_of_files_are_refused(names, message, tmp_path):
    for name in names:
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path, "train", tmp_path / "cache")
    # a file by itself is read whatever its name
    assert rows(tmp_path / f"{names[-1]}.jsonl", None, tmp_path / "cache") == ["a"] * 3


def test_splits_of_as_many_rows_have_digests_of_their_own(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 9}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    train, valid = (RowDocuments(tmp_path, None, s, tmp_path / "c") for s in ("train", "valid"))
    assert train.read([0])[0] == ["train"] and valid.read([0])[0] == ["test"]
    assert train.digest != valid.digest


@pytest.mark.parametrize("kind", ["saved", "splits", "parquet", "jsonl", "folder"])
def test_rows_of_every_kind_of_data_set(kind, tmp_path):
    values = [f"{i}: {TEXT[i % len(TEXT)]}" for i in range(300)]
    table = datasets.Dataset.from_dict({"text": values, "id": list(range(300))})
    path = tmp_path / "data"
    if kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "splits":
        parts = {"train": table.select(range(280)), "validation": table.select(range(280, 300))}
        datasets.DatasetDict(parts).save_to_disk(str(path))
    elif kind == "parquet":
        path = path.with_suffix(".parquet")
        table.to_parquet(str(path))
    elif kind == "jsonl":
        path = write_jsonl(path.with_suffix(".jsonl"), [{"text": value} for value in values])
    else:
        path.mkdir()
        for i in range(2):
            part = values[150 * i : 150 * (i + 1)]
            write_jsonl(path / f"{i}.jsonl", [{"text": value} for value in part])
    train, valid = (rows(path, split, tmp_path / "cache") for split in ("train", "valid"))
    assert set(train) | set(valid) == set(values) and not set(train) & set(valid)
    assert valid == values[280:] if kind == "splits" else 1 <= len(valid) <= 20
    if kind != "splits":
        assert rows(path, None, tmp_path / "cache") == values


def test_few_rows_hold_out_the_last_and_rows_that_are_added_move_none(tmp_path):
    def split_of(count, split):
        path = write_jsonl(tmp_path / f"{count}.jsonl", [{"text": f"{i}"} for i in range(count)])
        return rows(path, split, tmp_path / "cache")

    assert split_of(5, "train") == ["0", "1", "2", "3"] and split_of(5, "valid") == ["4"]
    with pytest.raises(ValueError, match=r"the train split of .* must have rows, got none"):
        split_of(1, "train")
    few, many = split_of(200, "valid"), split_of(400, "valid")
    assert few and [row for row in many if int(row) < 200] == few


@pytest.mark.parametrize(
    "row, column, form, read",
    [
        ({"text": "a", "id": 1}, None, "text", "a"),
        ({"body": "a", "text": "b"}, "body", "text", "a"),
        ({"prompt": "a", "completion": "b"}, None, "instruction", ("a", "b")),
        ({"messages": MESSAGES}, None, "chat", MESSAGES),
        ({"talk": MESSAGES, "text": "a"}, "talk", "chat", MESSAGES),
    ],
)
def test_columns_say_what_a_row_is(row, column, form, read, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row, row])
    documents = RowDocuments(path, column, None, tmp_path / "cache")
    assert documents.form == form
    found, names = documents.read([1])
    assert found == [read]
    assert names[0].startswith(f"{path}: ") and names[0].endswith(" of row 1")
    copy = pickle.loads(data := pickle.dumps(documents))
    assert len(data) < 1000 and copy.read([1]) == (found, names)


@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl"])
def test_conversations_from_arrow_have_no_nulls(kind, tmp_path):
    """Arrow gives all structs the same keys, so that those that a message lacks are null."""

    def talk(arguments):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        ask = {"role": "user", "content": "a"}
        return [ask, {"role": "assistant", "content": None, "tool_calls": calls}]

    talks = [talk({"a": [None, {"c": 0}]}), talk({"b": {"d": None, "e": ""}})]
    values = [{"messages": talk} for talk in talks]
    table = pyarrow.Table.from_pylist(values)  # from_list of `datasets` may know JSON
    path = tmp_path / f"a.{kind}"
    if kind == "saved":
        datasets.Dataset(table).save_to_disk(str(path))
    elif kind == "parquet":
        parquet.write_table(table, path)
    else:
        write_jsonl(path, values)
    found = rows(path, None, tmp_path / "cache")
    if kind == "jsonl":
        assert found == talks
        return
    for messages in talks:
        del messages[1]["content"]
    del talks[1][1]["tool_calls"][0]["function"]["arguments"]["b"]["d"]
    assert found == talks
    documents = RowDocuments(path, None, None, tmp_path / "cache")
    copy = pickle.loads(pickle.dumps(documents))
    assert copy.read([1])[0] == talks[1:]


@pytest.mark.parametrize(
    "row, column, message",
    [
        (
            {"body": "a"},
            None,
            "must have one of the columns text, messages, or prompt and .* got body",
        ),
        ({"text": "a", "messages": MESSAGES}, None, "must have one of the columns text, messages"),
        ({"text": "a"}, "body", r"--data.column must be a column of .*, one of text, got 'body'"),
    ],
)
def test_unclear_columns_are_refused(row, column, message, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row, row])
    with pytest.raises(ValueError, match=message):
        RowDocuments(path, column, None, tmp_path / "cache")


def test_unusable_paths_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"bad.jsonl cannot be read as jsonl: JSON parse error"):
        RowDocuments(tmp_path / "bad.jsonl", None, None, tmp_path / "cache")
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"of one kind, got \.parquet and \.jsonl at"):
        RowDocuments(tmp_path, None, None, tmp_path / "cache")
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        str(tmp_path / "dict")
    )
    with pytest.raises(ValueError, match=r"must have a split named train, got test"):
        RowDocuments(tmp_path / "dict", None, None, tmp_path / "cache")


@pytest.mark.parametrize(
    "name, contents, message",
    [
        ("a.jsonl", "", "the .jsonl files of {} must have rows, got empty files"),
        ("a.jsonl", "\n\n", "{} cannot be read as jsonl: "),
        ("a.parquet", "", "the .parquet files of {} must have rows, got empty files"),
        ("a.parquet", "garbage", "{} cannot be read as parquet: Parquet file size is 7 bytes"),
        ("dataset_dict.json", "{{}}", "{} cannot be read as what save_to_disk wrote: KeyError"),
        ("dataset_dict.json", "x", "{} cannot be read as what save_to_disk wrote: Expecting value"),
    ],
)
def test_damaged_rows_are_named(name, contents, message, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_text(contents.format())
    with pytest.raises(ValueError, match="^hf: " + re.escape(message.format(tmp_path / "rows"))):
        rows(tmp_path / "rows", None, tmp_path / "cache")


def test_a_row_that_is_not_utf_8_is_named(tmp_path):
    """pyarrow reads such a file, and fails when it makes strings of the rows."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 7 + b'{"text": "b \xff c"}\n')
    documents = RowDocuments(path, None, None, tmp_path / "cache")
    assert documents.read([0, 6])[0] == ["a", "a"]
    message = rf"^{path}: text of row 7 must be UTF-8, got b'b \\xff c': 'utf-8' codec can't decode"
    with pytest.raises(ValueError, match=message):
        documents.read([6, 7])


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_a_named_column_of_any_strings_has_texts(kind, tmp_path):
    table = pyarrow.table({"body": pyarrow.array(["a", "b"], getattr(pyarrow, kind)())})
    parquet.write_table(table, tmp_path / "a.parquet")
    documents = RowDocuments(tmp_path / "a.parquet", "body", None, tmp_path / "cache")
    assert documents.form == "text"
    assert documents.read([0, 1])[0] == ["a", "b"]


def test_digests_follow_the_documents(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i}", "body": "b"} for i in range(99)])
    found = [
        RowDocuments(path, column, split, tmp_path / "cache").digest
        for column in ("text", "body")
        for split in ("train", "valid", None)
    ]
    assert len(set(found)) == 6
    again = RowDocuments(path, "text", "train", tmp_path / "other").digest
    assert again == found[0]
    write_jsonl(path, [{"text": f"{i + 1}", "body": "b"} for i in range(99)])
    assert RowDocuments(path, "text", "train", tmp_path / "cache").digest != found[0]
    text = tmp_path / "a.txt"
    text.write_text("a\nb\n" * 50)
    splits = [TextDocuments([("a.txt", text)], s).digest for s in ("train", "valid", None)]
    assert len(set(splits)) == 3


def test_the_share_that_is_held_out():
    share = (fla_cp.train.documents._hashed(np.arange(100_000)) < 0.03).mean()
    assert 0.028 < share < 0.032
