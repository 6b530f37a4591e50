import hashlib
import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from mdn.data import gpt2
from mdn.data.shards import INDEX, ShardWriter, open_split, read_index, write_index

LENGTHS = [3, 1, 7, 5, 2, 40, 1, 1, 6]


def make_documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [np.append(draw.integers(0, gpt2.EOT, n - 1), gpt2.EOT).astype(np.uint16) for n in lengths]


def write_set(folder: Path, documents: list[np.ndarray], shard_tokens: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, part in (("train", documents), ("heldout_wiki", documents[:2])):
        writer = ShardWriter(folder, split, shard_tokens)
        for document in part:
            writer.write(document)
        splits[split] = writer.close()
    write_index(folder, splits, [{"name": "wiki", "sha256": "0", "license": "CC BY-SA"}])
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_set(tmp_path / "tiny", make_documents(LENGTHS))


@pytest.mark.parametrize("shard_tokens", [1, 2, 10, 13, 40, 66, 1000])
def test_documents_round_trip_through_shards_of_any_size(tmp_path, shard_tokens):
    documents = make_documents(LENGTHS)
    split = open_split(write_set(tmp_path, documents, shard_tokens), "train", verify=True)
    read = list(split.documents())
    assert [document.tolist() for document in read] == [document.tolist() for document in documents]
    assert all(document.dtype == np.uint16 for document in read)
    assert all(shard.tokens <= shard_tokens or shard.documents == 1 for shard in split.shards)
    assert len(split) == sum(LENGTHS)


def test_any_range_of_tokens_reads_across_shards(folder):
    split, whole = open_split(folder, "train"), np.concatenate(make_documents(LENGTHS))
    assert len(split.shards) > 3
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert np.array_equal(split.tokens(start, stop), whole[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 67), (67, 68)])
def test_a_range_outside_the_split_is_an_error(folder, start, stop):
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) leave split train, which has 66"):
        open_split(folder, "train").tokens(start, stop)


def test_files_are_little_endian_and_as_the_index_says(folder):
    index = json.loads((folder / INDEX).read_text())
    shard = index["splits"]["train"]["shards"][0]
    assert shard["file"] == "train-00000.bin"
    assert shard["document_offsets"] == "train-00000.idx"
    raw = (folder / shard["file"]).read_bytes()
    first = make_documents(LENGTHS)[0]
    assert raw[:6] == b"".join(int(token).to_bytes(2, "little") for token in first)
    assert shard["sha256"] == hashlib.sha256(raw).hexdigest()
    offsets = (folder / shard["document_offsets"]).read_bytes()
    assert offsets[:16] == (0).to_bytes(8, "little") + (3).to_bytes(8, "little")
    assert index["version"] == 1
    assert index["tokenizer"] == {"name": "gpt2", "sha256": gpt2.SHA256}
    assert index["splits"]["train"]["tokens"] == 66
    assert index["splits"]["train"]["documents"] == 9
    assert not list(folder.glob("*.tmp"))


def test_the_digest_follows_tokens_and_nothing_else(tmp_path):
    documents = make_documents(LENGTHS)
    same, again, other = (
        read_index(write_set(tmp_path / name, docs))["digest"]
        for name, docs in [("a", documents), ("b", documents), ("c", make_documents(LENGTHS, seed=1))]
    )
    assert same == again != other


def test_shards_have_temporary_names_until_they_are_complete(tmp_path):
    writer = ShardWriter(tmp_path, "train", 100)
    writer.write(make_documents([5])[0])
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.bin.tmp"]
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-00000.bin", "train-00000.idx"]


def test_shards_and_index_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    synced, replace = set(), Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")))

    def named(path, to):
        assert str(path) in synced
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", named)
    writer = ShardWriter(tmp_path, "train", 100)
    writer.write(np.array([1, 2, 3], dtype=np.uint16))
    write_index(tmp_path, {"train": writer.close()}, [])
    assert len(synced) == 4
    assert str(tmp_path) in synced, "and so are the names"


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    writer = ShardWriter(tmp_path, "train", 100)
    with pytest.raises(TypeError):
        writer.write(np.array([70_000]))
    with pytest.raises(ValueError, match="without tokens"):
        writer.write(np.array([], dtype=np.uint16))
    with pytest.raises(ValueError, match="shard_tokens: 0"):
        ShardWriter(tmp_path, "train", 0)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "verify", "error"),
    [
        ("train-00001.bin", cut, False, "train-00001.bin: 12 bytes, not 14"),
        ("train-00001.idx", cut, False, "train-00001.idx: 14 bytes, not 16"),
        ("train-00001.bin", Path.unlink, False, "train-00001.bin: not found"),
        ("train-00001.bin", flip, True, "train-00001.bin: sha256 is"),
        ("train-00001.idx", flip, True, "train-00001.idx: offsets do not rise"),
        (INDEX, cut, False, "index.json: damaged"),
        (INDEX, Path.unlink, False, "index.json: not found"),
    ],
)
def test_damage_is_named_in_one_line_with_the_remedy(folder, name, harm, verify, error):
    harm(folder / name)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        open_split(folder, "train", verify)
    assert error in str(caught.value)
    assert "`dvc repro -f prepare@tiny`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("version", 2, "version is 2, not 1"),
        (
            "tokenizer",
            {"name": "gpt2", "sha256": "f" * 64},
            f"tokenizer sha256 is {'f' * 64}, not {gpt2.SHA256}",
        ),
        ("splits", None, "damaged"),
    ],
)
def test_an_index_of_another_kind_is_refused(folder, key, value, error):
    index = json.loads((folder / INDEX).read_text())
    index[key] = value
    if value is None:
        del index[key]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="dvc repro -f prepare@tiny") as caught:
        open_split(folder, "train")
    assert error in str(caught.value)


def test_an_unknown_split_lists_those_there(folder):
    with pytest.raises(ValueError, match="no split 'heldout_c4'; it has train, heldout_wiki"):
        open_split(folder, "heldout_c4")


def test_a_split_pickles_as_its_path(folder):
    split = open_split(folder, "train")
    tokens = split.tokens(0, 66)
    pickled = pickle.dumps(split)
    assert tokens.tobytes() not in pickled
    assert np.array_equal(pickle.loads(pickled).tokens(0, 66), tokens)


def test_more_shards_than_file_descriptors_can_be_read(tmp_path):
    documents = make_documents([4] * 400)
    split = open_split(write_set(tmp_path, documents, shard_tokens=4), "train")
    assert len(split.shards) == 400
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 150, hard))
    try:
        assert np.array_equal(split.tokens(0, 1600), np.concatenate(documents))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
