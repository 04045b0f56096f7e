"""Folders of safetensors: what is written is read again, in parts, and damage is named."""

import json
import re

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors import safe_open

from fla_cp.integrations import safetensors_folder
from fla_cp.integrations.safetensors_folder import TensorFolder, new_folder, write_tensors
from tests.support.checkpoints import disk_of


def drawn():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator)
    return {
        "matrix": x,
        "transposed": x.T,  # shares the memory of the first
        "half": x.bfloat16()[1:4],
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "ids": torch.arange(7),
    }


def written(path, tensors, **options):
    with new_folder(path) as partial:
        write_tensors(partial, tensors.items(), **options)
    return path


def files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("shard_bytes", [1, 200, 10**9])
def test_what_is_written_is_read_whole_and_by_rows(tmp_path, shard_bytes):
    tensors = drawn()
    folder = TensorFolder(written(tmp_path / "new" / "m", tensors, shard_bytes=shard_bytes))
    assert set(folder.tensors) == set(tensors)
    for name, x in tensors.items():
        stored = folder.tensors[name]
        assert (stored.shape, stored.dtype, stored.nbytes) == (tuple(x.shape), x.dtype, x.nbytes)
        assert torch.equal(folder.read(name), x)
        for begin in range(len(x) if x.ndim else 0):
            for end in range(begin, len(x) + 1):
                assert torch.equal(folder.read(name, begin, end), x[begin:end])
    shards = [file for file in folder.path.iterdir() if file.suffix == ".safetensors"]
    assert len(shards) == {1: 6, 200: 3, 10**9: 1}[shard_bytes]
    for shard in shards:
        assert safe_open(shard, "pt").metadata() == {"format": "pt"}
    assert not [file for file in folder.path.parent.iterdir() if file.name.startswith(".")]


def test_an_index_counts_the_bytes_and_equal_tensors_give_equal_files(tmp_path):
    first = written(tmp_path / "a", drawn(), shard_bytes=200)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in drawn().values())
    assert files(first) == files(written(tmp_path / "b", drawn(), shard_bytes=200))


def test_tensors_may_have_other_names_here(tmp_path):
    folder = TensorFolder(written(tmp_path / "m", drawn()), {"matrix": "known", "absent": "x"})
    assert set(folder.tensors) == {"known", *drawn()} - {"matrix"}
    assert torch.equal(folder.read("known", 1, 3), drawn()["matrix"][1:3])


def test_rows_that_a_tensor_does_not_have_are_refused(tmp_path):
    folder = TensorFolder(written(tmp_path / "m", drawn()))
    for rows in ((-1, 2), (0, 7), (3, 2)):
        with pytest.raises(ValueError, match="rows of matrix, 0 to 6"):
            folder.read("matrix", *rows)
    with pytest.raises(ValueError, match="rows of scalar"):
        folder.read("scalar", 0, 0)
    with pytest.raises(KeyError):
        folder.read("unknown")


def test_a_shard_is_closed_after_some_bytes_so_that_its_pages_are_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_folder, "_MAPPED_BYTES", 100)
    folder = TensorFolder(written(tmp_path / "m", drawn()))
    opened = []
    real = safetensors_folder._opened
    monkeypatch.setattr(
        safetensors_folder, "_opened", lambda path: opened.append(path) or real(path)
    )
    for row in range(6):  # of 20 bytes each
        folder.read("matrix", row, row + 1)
        folder.read("matrix", row, row + 1)
    assert len(opened) == 2
    folder.close()
    folder.read("scalar")
    assert len(opened) == 3


def test_a_damaged_folder_is_refused_by_the_name_of_its_file(tmp_path):
    path = written(tmp_path / "m", drawn(), shard_bytes=200)
    index = path / "model.safetensors.index.json"
    text, shard = index.read_text(), path / "model-00001-of-00003.safetensors"
    whole = shard.read_bytes()
    for cut in (0, 5, 60, len(whole) - 1):
        shard.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model-00001-of-00003.* cannot be read"):
            TensorFolder(path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"has no model-00001-of-00003.*index.json names"):
        TensorFolder(path)
    shard.write_bytes(whole)
    index.write_text(text.replace('"matrix"', '"other"'))
    with pytest.raises(ValueError, match=r"00001-of-00003.safetensors has no other, for which"):
        TensorFolder(path)
    index.write_text(text.replace("model-00001", "../model-00001"))
    with pytest.raises(ValueError, match=r"files of its own folder, got '../model-00001"):
        TensorFolder(path)
    for broken in ("", "{}", '{"weight_map": 3}', "[]"):
        index.write_text(broken)
        with pytest.raises(ValueError, match=r"index.json must be JSON with a weight_map"):
            TensorFolder(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt"])
def test_pickled_weights_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name} is a pickle"):
        TensorFolder(tmp_path)


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have model.safetensors or"):
        TensorFolder(tmp_path)
    with pytest.raises(ValueError, match="must be a folder"):
        TensorFolder(tmp_path / "nowhere")


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="got matrix twice"), new_folder(tmp_path / "m") as partial:
        write_tensors(partial, [("matrix", torch.ones(1))] * 2)
    with pytest.raises(ValueError, match="one at least"), new_folder(tmp_path / "m") as partial:
        write_tensors(partial, [])
    with (
        pytest.raises(ValueError, match="at least 1, got 0"),
        new_folder(tmp_path / "m") as partial,
    ):
        write_tensors(partial, drawn().items(), shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_named(tmp_path):
    with (
        disk_of(100),
        pytest.raises(OSError, match=r"cannot write .*/\.m\.partial-.*: .*File too large"),
        new_folder(tmp_path / "m") as partial,
    ):
        write_tensors(partial, drawn().items())
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    message = f"{tmp_path / 'file' / 'm'} must be a folder that can be made: [Errno "
    with pytest.raises(ValueError, match=re.escape(message)), new_folder(tmp_path / "file" / "m"):
        pass


def test_a_folder_with_files_is_not_replaced(tmp_path):
    (tmp_path / "note").write_text("kept")
    with pytest.raises(ValueError, match="must not exist yet"), new_folder(tmp_path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["note"]
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as partial:
        (partial / "x").write_text("")
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["x"]
