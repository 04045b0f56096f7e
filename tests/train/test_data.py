"""Data: packing, splits, sources, the step sampler, collation and the batch hash."""

import os
import pickle
import time
from itertools import chain, islice, pairwise

import numpy as np
import pytest
import torch

import fla_cp.train.memmap
from fla_cp.train.data import ArraySource, PackedDataset, StepBatchSampler, batch_hash, collate
from fla_cp.train.memmap import MemmapSource, write_memmap
from fla_cp.train.sources import build_dataset
from fla_cp.train.text_files import held_out_split

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [], [12, 13]]


def flat(lists):
    return list(chain.from_iterable(lists))


def array_source(documents=DOCUMENTS):
    offsets = np.cumsum([0] + [len(d) for d in documents])
    return ArraySource(np.array(flat(documents), dtype=np.uint8), offsets, vocab_size=256)


def token_by_token_labels(documents):
    return [t for d in documents if d for t in [*d[1:], -100]]


def write_text_folder(root, files=200, size=300):
    for i in range(files):
        path = root / f"part{i % 7}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 + (i + j) % 251 for j in range(size + i)))  # no NUL: not binary
    return root


@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 5, 13])
def test_packs_are_the_stream_with_labels_shifted_inside_documents(seq_len):
    packs = list(PackedDataset(array_source(), seq_len))
    count = 13 // seq_len
    tokens = torch.cat([p["tokens"] for p in packs]).tolist()
    labels = torch.cat([p["labels"] for p in packs]).tolist()
    assert len(packs) == count
    assert tokens == flat(DOCUMENTS)[: count * seq_len]
    assert labels == token_by_token_labels(DOCUMENTS)[: count * seq_len]


def test_cu_seqlens_mark_documents_and_skip_empty_ones():
    packs = PackedDataset(array_source(), 6)
    assert packs[0]["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert packs[1]["cu_seqlens"].tolist() == [0, 5, 6]
    assert packs[-1]["tokens"].tolist() == packs[1]["tokens"].tolist()
    for name, dtype in (("tokens", torch.int64), ("labels", torch.int64)):
        assert packs[0][name].dtype == dtype
        assert packs[0][name].shape == (6,)
    assert packs[0]["cu_seqlens"].dtype == torch.int32


def test_last_token_of_a_pack_has_its_target_unless_the_document_or_split_ends_there():
    whole = PackedDataset(array_source(), 6)
    assert whole[0]["labels"][-1] == 7  # the document of 5..11 continues in the next pack
    cut = PackedDataset(array_source(), 6, stop=6)
    assert cut[0]["labels"][-1] == -100  # token 6 belongs to another split


def test_pack_index_out_of_range_ends_iteration():
    packs = PackedDataset(array_source(), 6)
    with pytest.raises(IndexError, match="pack 2 of 2"):
        packs[2]


def test_too_short_seq_len_and_too_little_data_are_named():
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        PackedDataset(array_source(), 0)
    with pytest.raises(ValueError, match=r"13 tokens, fewer than one pack of seq_len=14"):
        PackedDataset(array_source(), 14)


@pytest.mark.parametrize("spec", ["stdlib", "synthetic", "text", "memmap"])
def test_every_source_obeys_the_pack_contract(spec, tmp_path):
    if spec == "text":
        spec = f"text:{write_text_folder(tmp_path)}"
    elif spec == "memmap":
        documents = [np.arange(50 + i) % 300 for i in range(100)]
        write_memmap(tmp_path / "tokens", documents, vocab_size=300)
        spec = f"memmap:{tmp_path / 'tokens.bin'}"
    for split in ("train", "valid"):
        packs = build_dataset(spec, 129, split, seed=0)
        again = build_dataset(spec, 129, split, seed=0)
        assert len(packs) >= 1
        for i in (0, len(packs) // 2, len(packs) - 1):
            pack = packs[i]
            assert batch_hash(collate([pack])) == batch_hash(collate([again[i]]))
            tokens, labels, cu = pack["tokens"], pack["labels"], pack["cu_seqlens"].tolist()
            assert cu[0] == 0
            assert cu[-1] == 129
            assert all(a < b for a, b in pairwise(cu))
            assert 0 <= tokens.min() <= tokens.max() < packs.vocab_size
            inner = torch.ones(129, dtype=torch.bool)
            inner[torch.tensor(cu[1:]) - 1] = False
            assert torch.equal(labels[inner], tokens[1:][inner[:-1]])
            assert (labels[~inner][:-1] == -100).all()


def test_stdlib_is_source_text_read_quickly():
    start = time.perf_counter()
    train = build_dataset("stdlib", 1024, "train", seed=0)
    assert time.perf_counter() - start < 10
    valid = build_dataset("stdlib", 1024, "valid", seed=1)
    assert train.vocab_size == valid.vocab_size == 256
    assert len(train) * 1024 > 5_000_000
    assert 0.005 < len(valid) / len(train) < 0.1
    text = bytes(train.source.tokens)
    assert b"def dataclass(" in text


def test_text_splits_share_no_file_and_cover_all(tmp_path):
    root = write_text_folder(tmp_path)
    (root / ".hidden").write_text("not read")
    splits = {s: build_dataset(f"text:{root}", 64, s, seed=0).source for s in ("train", "valid")}
    total = sum(p.stat().st_size for p in root.rglob("*.txt"))
    assert len(splits["train"]) + len(splits["valid"]) == total
    lengths = [np.diff(s.offsets) for s in splits.values()]
    assert sorted(np.concatenate(lengths)) == sorted(300 + i for i in range(200))
    assert 1 <= len(lengths[1]) <= 20


def test_binary_and_unreadable_files_of_a_folder_are_skipped_with_a_note(tmp_path, monkeypatch):
    root = write_text_folder(tmp_path)
    kept = len(build_dataset(f"text:{root}", 64, "train", seed=0).source)
    assert build_dataset(f"text:{root}", 64, "train", seed=0).notes == ()
    for i in range(4):
        (root / f"image{i}.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00" * 100)
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")  # reading it would wait for ever
    late = root / "late.bin"
    late.write_bytes(b"x" * 8192 + b"\x00")  # the first bytes decide, as for grep
    held_out = held_out_split([("late.bin", late)], "valid")
    train = build_dataset(f"text:{root}", 64, "train", seed=0)
    assert len(train.source) == kept + (0 if held_out else 8193)
    (note,) = train.notes
    assert note == (
        f"note: skipped 4 files below {root} that are binary or cannot be read: "
        "'image0.png', 'image1.png', 'image2.png', .."
    )
    assert build_dataset(f"text:{root}", 64, "valid", seed=0).notes == ()

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"all 205 files below .* are binary or cannot be read"):
        build_dataset(f"text:{root}", 64, "train", seed=0)
    with pytest.raises(ValueError, match="pipe must be a file or a folder, not a device, pipe"):
        build_dataset(f"text:{root / 'pipe'}", 64, "train", seed=0)


def test_links_to_folders_are_noted_since_they_are_not_followed(tmp_path):
    root = write_text_folder(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/long.txt").write_text("x" * 5000)
    kept = len(build_dataset(f"text:{root}", 64, "train", seed=0).source)
    for name in ("sub", "cycle", ".hidden"):
        (root / name).symlink_to(root if name == "cycle" else tmp_path / "other")
    (root / "image.png").write_bytes(b"\0")
    train = build_dataset(f"text:{root}", 64, "train", seed=0)
    assert len(train.source) == kept
    assert train.notes == (
        f"note: skipped 1 file below {root} that are binary or cannot be read: 'image.png'",
        f"note: did not follow 2 links to folders below {root}: 'cycle', 'sub'",
    )
    assert build_dataset(f"text:{root}", 64, "valid", seed=0).notes == ()
    (tmp_path / "links").mkdir()
    (tmp_path / "links/sub").symlink_to(root)
    message = r"no files below .*links \(hidden ones and links to folders are left out\)"
    with pytest.raises(ValueError, match=message):
        build_dataset(f"text:{tmp_path / 'links'}", 64, "train", seed=0)


def test_single_text_file_holds_out_its_tail(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(i % 256 for i in range(1000)))
    train = build_dataset(f"text:{path}", 10, "train", seed=0)
    valid = build_dataset(f"text:{path}", 10, "valid", seed=0)
    assert (len(train), len(valid)) == (97, 3)
    assert train[96]["labels"][-1] == -100
    assert valid[0]["tokens"][0] == 970 % 256


@pytest.mark.parametrize(
    "spec, message",
    [
        ("wikitext", "unknown data 'wikitext': expected one of stdlib, text:PATH, memmap:PATH"),
        ("text:", "expected one of stdlib, text:PATH"),
        ("stdlib:x", "expected one of stdlib, text:PATH"),
        ("text:missing", "no file or folder at missing"),
        ("memmap:missing", r"no file at missing\.bin"),
    ],
)
def test_unusable_specs_are_named(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_dataset(spec, 8, "train", seed=0)


def test_empty_folder_unknown_split_and_tiny_text(tmp_path):
    with pytest.raises(ValueError, match="no files below"):
        build_dataset(f"text:{tmp_path}", 8, "train", seed=0)
    with pytest.raises(ValueError, match="split must be 'train' or 'valid', got 'test'"):
        build_dataset("stdlib", 8, "test", seed=0)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"the train split of 'text:.*' has 5 tokens, fewer than"):
        build_dataset(f"text:{tmp_path}", 8, "train", seed=0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_memmap_round_trip(dtype, tmp_path):
    vocab_size = 70_000 if dtype == "uint32" else 60_000
    documents = [[1, vocab_size - 1], [], [5], [7, 8, 9]]
    write_memmap(tmp_path / "tokens.bin", documents, vocab_size, dtype)
    source = MemmapSource(tmp_path / "tokens")
    assert source.vocab_size == vocab_size
    assert source.read(0, len(source)).tolist() == [1, vocab_size - 1, 5, 7, 8, 9]
    assert source.starts(0, 6).tolist() == [2, 3, 6]
    assert source.starts(2, 3).tolist() == [3]


def test_memmap_with_eos_or_with_tokens_alone(tmp_path):
    np.array([4, 5, 0, 0, 6, 7], dtype=np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocab_size": 8, "eos_id": 0}')
    source = MemmapSource(tmp_path / "t.bin")
    assert source.starts(0, 6).tolist() == [3, 4]
    pack = PackedDataset(source, 6)[0]
    assert pack["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert pack["labels"].tolist() == [5, 0, -100, -100, 7, -100]
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocab_size": 8}')
    assert MemmapSource(tmp_path / "t.bin").starts(0, 6).tolist() == []


def test_memmap_mask_leaves_labels_out(tmp_path):
    documents, masks = [[1, 2, 3, 4], [], [5, 6]], [[0, 1, 0, 1], [], [1, 1]]
    write_memmap(tmp_path / "t", documents, 8, masks=masks)
    source = MemmapSource(tmp_path / "t")
    assert source.counted(0, 6).tolist() == [False, True, False, True, True, True]
    assert source.counted(3, 5).dtype == bool
    copy = pickle.loads(pickle.dumps(PackedDataset(source, 3)))
    assert copy[0]["labels"].tolist() == [2, -100, 4]
    assert copy[1]["labels"].tolist() == [-100, 6, -100]
    for wrong in ([[0, 1], [], [1, 1]], [[0, 1, 0, 1], []]):
        with pytest.raises(ValueError, match=r"document \d: its mask must have as many values as"):
            write_memmap(tmp_path / "w", documents, 8, masks=wrong)
    (tmp_path / "t.mask").write_bytes(b"\0\1\0\2\1\1")
    with pytest.raises(ValueError, match=r"t.mask: must hold only 0 and 1, got 2 at 3"):
        MemmapSource(tmp_path / "t").counted(1, 6)
    (tmp_path / "t.mask").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match="must hold one byte for each of the 6 tokens, got 2"):
        MemmapSource(tmp_path / "t")
    (tmp_path / "t.mask").unlink()
    with pytest.raises(ValueError, match=r"memmap: no file at .*t\.mask"):
        MemmapSource(tmp_path / "t")


def test_memmap_is_not_read_ahead_and_pickles_small(tmp_path):
    size = 1 << 20
    write_memmap(tmp_path / "t", [np.zeros(size, dtype=np.uint16)], vocab_size=4)
    packs = build_dataset(f"memmap:{tmp_path / 't'}", 16, "train", seed=0)
    assert packs[0]["tokens"].tolist() == [0] * 16
    assert isinstance(packs.source._tokens, np.memmap)
    restored = pickle.loads(data := pickle.dumps(packs))
    assert len(data) < 2000
    assert torch.equal(restored[3]["labels"], packs[3]["labels"])


@pytest.mark.parametrize(
    "meta, message",
    [
        ("not json", "must be JSON that holds dtype and vocab_size"),
        ("\udcff", "must be JSON that holds dtype and vocab_size"),
        ("[" * 100_000, "must be JSON that holds dtype and vocab_size"),
        ('{"dtype": "uint16"}', "must hold dtype and vocab_size, but has no vocab_size"),
        ('["uint16", 8]', "must hold a JSON object, got list"),
        ('{"dtype": ["uint16"], "vocab_size": 8}', r"dtype must be a string, got \['uint16'\]"),
        ('{"dtype": "uint16", "vocab_size": "8"}', "vocab_size must be an integer, got '8'"),
        ('{"dtype": "uint16", "vocab_size": true}', "vocab_size must be an integer, got True"),
        ('{"dtype": "uint16", "vocab_size": 8, "eos_id": 1.5}', "eos_id must be an integer"),
        ('{"dtype": "uint16", "vocab_size": 8, "eos_id": true}', "eos_id must be an integer"),
        ('{"dtype": "uint16", "vocab_size": 8, "offsets": 3}', "offsets must be a string, got 3"),
        ('{"dtype": "uint16", "vocab_size": 8, "offsets": ""}', "offsets must name a file"),
        ('{"dtype": "int8", "vocab_size": 8}', "dtype must be one of uint16, uint32, got 'int8'"),
        ('{"dtype": "uint16", "vocab_size": 70000}', r"vocab_size must lie in \[1, 65536\]"),
        ('{"dtype": "uint32", "vocab_size": 8}', "must be a positive multiple of 4 bytes, got 6"),
        ('{"dtype": "uint16", "vocab_size": 8, "eos_id": 8}', "eos_id must lie in"),
        ('{"dtype": "uint16", "vocab_size": 8, "end": 0}', r"unknown keys \['end'\]"),
        ('{"dtype": "uint16", "vocab_size": 8, "offsets": "o"}', "must go from 0 to the 3 tokens"),
        ('{"dtype": "uint16", "vocab_size": 8, "offsets": "x"}', "no file at"),
        (
            '{"dtype": "uint16", "vocab_size": 8, "offsets": "o", "eos_id": 1}',
            "eos_id or offsets, not both",
        ),
    ],
)
def test_malformed_memmaps_are_named(meta, message, tmp_path):
    np.array([1, 2, 3], dtype=np.uint16).tofile(tmp_path / "t.bin")
    np.array([0, 4], dtype=np.int64).tofile(tmp_path / "o")
    (tmp_path / "t.json").write_bytes(meta.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        MemmapSource(tmp_path / "t")


def test_memmap_tokens_are_checked_where_they_are_read(tmp_path):
    np.array([1, 9, 3, 4], dtype=np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocab_size": 8}')
    source = MemmapSource(tmp_path / "t")
    with pytest.raises(ValueError, match="token 9 at position 1 is outside the vocabulary of 8"):
        source.read(0, 4)


@pytest.mark.parametrize("block", [1 << 20, 2])
@pytest.mark.parametrize(
    "offsets, message",
    [
        ([0, 3, 1, 4], r"offsets must not decrease, got 3 then 1 at index 1"),
        ([0, 9, 4], r"offsets must not decrease, got 9 then 4 at index 1"),  # outside the file
        ([0, 1, -5, 4], r"offsets must not decrease, got 1 then -5 at index 1"),
        ([0, 1, 9], r"must go from 0 to the 4 tokens of t.bin, got 0 to 9"),
    ],
)
def test_memmap_offsets_are_checked_on_opening(offsets, message, block, tmp_path, monkeypatch):
    monkeypatch.setattr(fla_cp.train.memmap, "OFFSETS_BLOCK", block)
    np.array([1, 2, 3, 4], dtype=np.uint16).tofile(tmp_path / "t.bin")
    np.array(offsets, dtype=np.int64).tofile(tmp_path / "t.offsets")
    meta = '{"dtype": "uint16", "vocab_size": 8, "offsets": "t.offsets", "eos_id": null}'
    (tmp_path / "t.json").write_text(meta)
    with pytest.raises(ValueError, match=message):
        MemmapSource(tmp_path / "t")


@pytest.mark.parametrize(
    "documents, vocab_size, dtype, message",
    [
        ([[1, 8]], 8, "uint16", r"document 0: tokens must lie in \[0, 8\), got 1 to 8"),
        ([[1], [-1]], 8, "uint16", "document 1: tokens must lie in"),
        ([[0.5]], 8, "uint16", "document 0: tokens must be integers, got float64"),
        ([[1]], 8, "int16", "dtype must be one of uint16, uint32, got 'int16'"),
        ([[1]], 0, "uint16", r"vocab_size must lie in \[1, 65536\], got 0"),
    ],
)
def test_write_memmap_refuses(documents, vocab_size, dtype, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_memmap(tmp_path / "t", documents, vocab_size, dtype)


def test_synthetic_depends_on_seed_and_split_and_can_be_learnt():
    def tokens(seed, split):
        return build_dataset("synthetic", 4096, split, seed)[3]["tokens"]

    assert torch.equal(tokens(0, "train"), tokens(0, "train"))
    assert not torch.equal(tokens(0, "train"), tokens(1, "train"))
    assert not torch.equal(tokens(0, "train"), tokens(0, "valid"))
    # A predictor that only looks up what followed the same token earlier in the document.
    packs = build_dataset("synthetic", 8192, "valid", seed=0)
    hits = targets = 0
    for i in range(8):
        row, cu = packs[i]["tokens"].tolist(), packs[i]["cu_seqlens"].tolist()
        for start, stop in pairwise(cu):
            seen = {}
            for now, after in pairwise(row[start:stop]):
                hits += seen.get(now) == after
                targets += 1
                seen[now] = after
    assert 0.5 < hits / targets < 0.95


@pytest.mark.parametrize("num_packs, batch", [(10, 4), (3, 8), (1, 5), (7, 7)])
def test_sampler_visits_every_pack_once_an_epoch(num_packs, batch):
    steps = list(islice(StepBatchSampler(num_packs, batch, seed=3), 2 * num_packs))
    assert all(len(step) == batch for step in steps)
    drawn = flat(steps)
    for epoch in range(len(drawn) // num_packs):
        assert sorted(drawn[epoch * num_packs :][:num_packs]) == list(range(num_packs))


def test_sampler_reshuffles_each_epoch_and_follows_its_seed():
    first, second = islice(StepBatchSampler(50, 50, seed=0), 2)
    assert first != second
    assert first != next(iter(StepBatchSampler(50, 50, seed=1)))
    assert first == next(iter(StepBatchSampler(50, 50, seed=0)))


@pytest.mark.parametrize("start", [0, 1, 5, 1000])
def test_sampler_resumes_at_any_step(start):
    whole = StepBatchSampler(10, 4, seed=5)
    expected = [whole.batch(step) for step in range(start, start + 6)]
    assert list(islice(StepBatchSampler(10, 4, seed=5, start_step=start), 6)) == expected
    restored = StepBatchSampler(10, 4, seed=5)
    restored.load_state_dict({"step": start})
    draws = iter(restored)
    assert [next(draws) for _ in range(3)] == expected[:3]
    assert restored.state_dict() == {"step": start + 3}
    behind = StepBatchSampler(10, 3, seed=5, start_step=start, first_pack=7)
    assert [*next(iter(behind)), *behind.batch(start + 1)] == whole.packs(7, 13)


def test_sampler_feeds_a_data_loader():
    packs = PackedDataset(array_source(), 3)
    sampler = StepBatchSampler(len(packs), 2, seed=0)
    loader = torch.utils.data.DataLoader(packs, batch_sampler=sampler, collate_fn=collate)
    batches = list(islice(loader, 5))
    assert all(batch["tokens"].shape == (1, 6) for batch in batches)
    expected = collate([packs[i] for i in sampler.batch(4)])
    assert batch_hash(batches[4]) == batch_hash(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1, 0), "num_packs must be at least 1, got 0"),
        ((1, 0, 0), "global_batch_size must be at least 1, got 0"),
        ((1, 1, -1), "seed and start_step must be >= 0, got -1 and 0"),
        ((1, 1, 0, -2), "got 0 and -2"),
    ],
)
def test_sampler_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepBatchSampler(*arguments)


def test_collate_folds_packs_into_one_row():
    packs = PackedDataset(array_source(), 6)
    batch = collate([packs[1], packs[0]])
    assert batch["tokens"].tolist() == [packs[1]["tokens"].tolist() + packs[0]["tokens"].tolist()]
    assert batch["labels"].shape == (1, 12)
    assert batch["cu_seqlens"].tolist() == [0, 5, 6, 9, 10, 12]
    assert batch["cu_seqlens"].dtype == torch.int32


def test_batch_hash_sees_every_change():
    packs = PackedDataset(array_source(), 6)
    batch = collate([packs[0], packs[1]])
    before = {key: value.clone() for key, value in batch.items()}
    value = batch_hash(batch)
    assert all(torch.equal(batch[key], before[key]) for key in batch)
    assert 0 <= value < 2**63
    seen = {value, batch_hash(collate([packs[1], packs[0]]))}
    for key in ("tokens", "labels", "cu_seqlens"):
        for i in range(batch[key].numel()):
            changed = {k: v.clone() for k, v in batch.items()}
            changed[key].view(-1)[i] += 1
            seen.add(batch_hash(changed))
    swapped = {**batch, "tokens": batch["tokens"][:, [1, 0, *range(2, 12)]].contiguous()}
    exchanged = {**batch, "tokens": batch["labels"], "labels": batch["tokens"]}
    seen |= {batch_hash(swapped), batch_hash(exchanged)}
    assert len(seen) == 2 + 12 + 12 + 6 + 2


def test_batch_hash_costs_little():
    batch = {
        "tokens": torch.randint(0, 256, (1, 1 << 17)),
        "labels": torch.randint(0, 256, (1, 1 << 17)),
        "cu_seqlens": torch.arange(0, (1 << 17) + 1, 512, dtype=torch.int32),
    }
    best = min(_seconds(batch_hash, batch) for _ in range(20))
    assert best < 0.005, f"{best * 1e3:.2f} ms for 128k tokens"


def _seconds(fn, *args):
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start
