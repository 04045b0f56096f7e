"""Damaged and foreign checkpoints: each is reported in one line; none runs code or ends a run."""

import contextlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from fla_cp.train import checkpoint, integrity
from fla_cp.train.config import UserError
from fla_cp.train.integrity import Damaged, FileSums, pack_sums, seal, unpack_sums, unseal, verify
from fla_cp.train.untrusted import restricted_metadata, trusted_metadata
from tests.support.checkpoints import Evil, OneRank, as_format_1

SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """A run with whole checkpoints of steps 1 and 2, whose shards have several blocks."""
    run = tmp_path_factory.mktemp("written")
    one = OneRank(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "BLOCK", 2**16)
        for step in (1, 2):
            one.update()
            one.save(run, step)
        yield run


@pytest.fixture
def run(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


def steps(run):
    return [run / "checkpoints" / f"step-{step:08d}" for step in (1, 2)]


def newest(run, ranks, resume="auto", trust=False):
    """The checkpoint that is chosen, and the lines that were printed."""
    lines = []
    found = checkpoint.find(resume, run)
    return checkpoint.newest_whole(found, resume, trust, ranks, lines.append)[0], lines


def edit(path, change):
    """Replaces trainer.json's record by change(record), with a valid checksum."""
    record = unseal((path / "trainer.json").read_bytes())
    del record["checksum"]
    (path / "trainer.json").write_bytes(seal(change(record)))


def reseal(path, name):
    """Updates the checksums of a replaced file, as a forger would."""
    data = (path / name).read_bytes()
    folder = path.parent / "reseal"
    folder.mkdir()
    with contextlib.closing(integrity._SummedFile(folder / name)) as file:
        file.write(data)
    sums = pack_sums([file.sums(name)])
    edit(path, lambda record: {**record, "files": {**record["files"], **sums}})


def replaced(name, data):
    return lambda path: (path / name).write_bytes(data)


def gone(name):
    return lambda path: (path / name).unlink()


def cut(name, share):
    def damage(path):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: int(len(data) * share)])

    return damage


def instead(make):
    def damage(path):
        shutil.rmtree(path)
        make(path)

    return damage


def shard_is(make):
    def damage(path):
        (path / SHARD).unlink()
        make(path / SHARD)

    return damage


DAMAGE = {
    "shard missing": (gone(SHARD), f"{SHARD} is missing"),
    "shard empty": (replaced(SHARD, b""), f"{SHARD} has 0 bytes instead of"),
    "shard cut short": (cut(SHARD, 0.9), f"{SHARD} has"),
    "shard a folder": (shard_is(Path.mkdir), "is no regular file"),
    "shard a pipe": (shard_is(os.mkfifo), "is no regular file"),
    "shard a dangling link": (shard_is(lambda p: p.symlink_to("nowhere")), "is missing"),
    "shard a loop of links": (shard_is(lambda p: p.symlink_to(p)), "cannot be read"),
    "metadata missing": (gone(".metadata"), ".metadata is missing"),
    "metadata empty": (replaced(".metadata", b""), ".metadata has 0 bytes"),
    "metadata cut short": (cut(".metadata", 0.5), ".metadata has"),
    "record missing": (gone("trainer.json"), "trainer.json cannot be read: No such file"),
    "record empty": (replaced("trainer.json", b""), "trainer.json is not valid JSON"),
    "record cut short": (cut("trainer.json", 0.7), "trainer.json is not valid JSON"),
    "record no UTF-8": (replaced("trainer.json", b"\xff\xfe{}"), "trainer.json is not valid JSON"),
    "record a list": (replaced("trainer.json", b"[1, 2]"), "must hold an object, not a list"),
    "record deep": (replaced("trainer.json", b"[" * 10**5), "trainer.json is not valid JSON"),
    "record without keys": (replaced("trainer.json", b"{}"), "has format None"),
    "record without model": (
        lambda path: edit(path, lambda r: {k: v for k, v in r.items() if k != "model"}),
        "must hold model, of type dict",
    ),
    "record of wrong types": (
        lambda path: edit(path, lambda r: {**r, "step": "2"}),
        "must hold step, of type int",
    ),
    "sums of wrong types": (
        lambda path: edit(path, lambda r: {**r, "files": {SHARD: 3}}),
        "holds no table of checksums",
    ),
    "sums of another folder": (
        lambda path: edit(path, lambda r: {**r, "files": {"../x": {"size": 0, "crc32": []}}}),
        "names a file outside the checkpoint: '../x'",
    ),
    "folder empty": (instead(Path.mkdir), "trainer.json cannot be read"),
    "folder a file": (instead(lambda p: p.write_text("x")), "it is no folder"),
    "folder a dangling link": (instead(lambda p: p.symlink_to("nowhere")), "it is no folder"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_gives_way_to_the_one_before(kind, run, ranks):
    old, new = steps(run)
    damage, reason = DAMAGE[kind]
    damage(new)
    taken, lines = newest(run, ranks)
    assert taken == old
    (line,) = lines
    assert line.startswith(f"{new} is damaged: ") and line.endswith("; trying the one before")
    assert reason in line
    # if --resume names its path, it is refused in one line
    if new.exists():
        with pytest.raises(UserError, match=r"^--resume: .*step-00000002 is damaged: .*$"):
            newest(run, ranks, str(new))
    assert checkpoint.set_aside(run, [new])[0].startswith("step-00000002 is set aside as ")
    assert newest(run, ranks) == (old, [])


def test_nothing_whole_is_an_error_and_no_fresh_start(run, ranks):
    for path in steps(run):
        (path / SHARD).write_bytes(b"")
    with pytest.raises(
        UserError, match=r"step-00000001 is damaged: .* \(to start afresh: --resume"
    ):
        newest(run, ranks)
    # a second time, since nothing was set aside
    with pytest.raises(UserError, match="to start afresh"):
        newest(run, ranks)
    assert newest(run / "empty", ranks) == (None, [])


def test_every_flipped_bit_is_found(run, ranks):
    _, path = steps(run)
    rng = random.Random(5)
    assert len(unpack_sums(unseal((path / "trainer.json").read_bytes())["files"])[0].blocks) > 1
    for name in (SHARD, ".metadata", "trainer.json"):
        data = (path / name).read_bytes()
        for _ in range(60):
            position, bit = rng.randrange(len(data)), rng.randrange(8)
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            (path / name).write_bytes(flipped)
            problem = checkpoint._problem(path, False, ranks)
            assert name in problem, f"bit {bit} of byte {position} of {name}: {problem!r}"
        (path / name).write_bytes(data)
    assert checkpoint._problem(path, False, ranks) == ""


def test_parts_cover_every_block_once(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK", 1000)
    data = random.Random(1).randbytes(4321)
    with contextlib.closing(integrity._SummedFile(tmp_path / "a")) as file:
        for start in range(0, len(data), 700):
            file.write(data[start : start + 700])
    sums = [file.sums("a")]
    assert len(sums[0].blocks) == 5 and sums[0].size == len(data)
    assert unpack_sums(json.loads(json.dumps(pack_sums(sums)))) == sums
    for byte in (0, 999, 1000, 4320):
        changed = bytearray(data)
        changed[byte] ^= 1
        (tmp_path / "a").write_bytes(changed)
        problems = [verify(tmp_path, sums, part, 3, 2) for part in range(3)]
        assert [bool(p) for p in problems] == [part == byte // 1000 % 3 for part in range(3)]
    (tmp_path / "a").write_bytes(b"")
    assert verify(tmp_path, sums, 0, 1, 4) == "a ends at byte 0 instead of 4321"
    assert verify(tmp_path, [FileSums("none", 0, ())], 0, 1, 1) == ""


def test_format_1_loads_with_a_note(run, ranks):
    old, path = steps(run)
    as_format_1(path)
    assert newest(run, ranks) == (path, [])
    one = OneRank(ranks, seed=3)
    (note,) = checkpoint.check_matches(path, one.facts())
    assert "is of format 1: it has no checksums" in note and "gate_lower_bound" in note
    assert one.load(path).step == 2
    # the sizes of its files are checked all the same
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-100])
    taken, lines = newest(run, ranks)
    assert taken == old and "bytes, too few for" in lines[0]
    # a shard that only looks complete ends in one line
    size = (path / SHARD).stat().st_size + 100
    (path / SHARD).write_bytes(bytes(size))
    with pytest.raises(UserError, match=r"^--resume: .*step-00000002 cannot be loaded: .*$"):
        one.load(path)


def test_a_later_format_is_refused(run, ranks):
    _, path = steps(run)
    edit(path, lambda record: {**record, "format": 3})
    with pytest.raises(UserError, match="has format 3; this version reads 1 and 2"):
        newest(run, ranks)


def test_damaged_metadata_is_never_an_error_of_pickle(run):
    data = (steps(run)[1] / ".metadata").read_bytes()
    whole = restricted_metadata(data)
    expected = trusted_metadata(data)
    assert whole.state_dict_metadata == expected.state_dict_metadata
    assert whole.storage_data == expected.storage_data
    rng = random.Random(2)
    refused = []
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 4))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        try:
            restricted_metadata(bytes(changed))
        except Damaged as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not any("\n" in reason for reason in refused)


@pytest.mark.parametrize("format", [1, 2])
def test_foreign_metadata_runs_no_code(run, ranks, tmp_path, format):
    _, path = steps(run)
    marker = tmp_path / "marker"
    metadata = trusted_metadata((path / ".metadata").read_bytes())
    metadata.planner_data = Evil(marker)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path, ".metadata") if format == 2 else as_format_1(path)
    with pytest.raises(UserError, match=r"asks for os\.makedirs, .* --run\.trust-checkpoint") as e:
        newest(run, ranks, str(path))
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match=r"os\.makedirs"):
        OneRank(ranks).load(path)
    assert not marker.exists()
    assert newest(run, ranks, str(path), trust=True) == (path, [])
    assert marker.exists()


def test_foreign_objects_in_shards_run_no_code(run, ranks, tmp_path):
    one, marker = OneRank(ranks), tmp_path / "marker"
    one.update()
    one.optimizer.param_groups[0]["foreach"] = Evil(marker)
    path = one.save(run, 3)
    other = OneRank(ranks)
    with pytest.raises(UserError, match=r"may run any code; --run\.trust-checkpoint") as error:
        other.load(path)
    assert "\n" not in str(error.value) and not marker.exists()
    assert checkpoint.load(path, other.model, other.optimizer, ranks, trust=True).step == 3
    assert marker.exists()


def test_tensors_in_shards_run_no_code(run, ranks, tmp_path):
    _, path = steps(run)
    marker = tmp_path / "marker"
    metadata = restricted_metadata((path / ".metadata").read_bytes())
    places = {key.fqn: place for key, place in metadata.storage_data.items()}
    place = places["model.embedding.weight"]
    torch.save(Evil(marker), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    assert len(evil) <= place.length
    data = bytearray((path / SHARD).read_bytes())
    place.length = len(evil)
    data[place.offset : place.offset + len(evil)] = evil
    (path / SHARD).write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    as_format_1(path)
    assert newest(run, ranks, str(path)) == (path, [])
    with pytest.raises(UserError, match=r"^--resume: .* cannot be loaded: [^\n]*$"):
        OneRank(ranks).load(path)
    assert not marker.exists()


def test_stray_entries_stop_nothing(run, ranks, tmp_path):
    root = run / "checkpoints"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    (root / ".partial-step-00000003").write_text("a file")
    (root / ".partial-step-00000004").symlink_to(precious)
    (root / ".partial-step-00000005").symlink_to("nowhere")
    (root / ".partial-old-step-00000001").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "step-3").mkdir()
    (root / "step-00000009").symlink_to(precious)
    taken, lines = newest(run, ranks)
    assert taken == steps(run)[1]
    assert len(lines) == 1 and "step-00000009 is damaged" in lines[0]
    checkpoint.clean(run, after=2)
    assert sorted(path.name for path in root.iterdir()) == [
        "notes.txt",
        "step-00000001",
        "step-00000002",
        "step-3",
    ]
    assert (precious / "data").read_text() == "x"
    # a save has to handle them, too
    (root / ".partial-step-00000003").symlink_to(precious)
    (root / "step-00000003").symlink_to("nowhere")
    assert OneRank(ranks).save(run, 3).is_dir()
    assert (precious / "data").read_text() == "x"


def test_checkpoint_of_another_model_ends_in_a_line(run, ranks):
    other = OneRank(ranks, "--mixer gdn")
    with pytest.raises(UserError, match=r"^--resume: .* cannot be loaded: .*Missing key.*$"):
        other.load(steps(run)[1])
    other = OneRank(ranks, "--model.head-dim 32")
    with pytest.raises(UserError, match=r"^--resume: .* cannot be loaded: [^\n]*$"):
        other.load(steps(run)[1])
