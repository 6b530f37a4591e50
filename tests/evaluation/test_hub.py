"""Sets of the Hub: found in their files, copied from a mirror, and said to be missing."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdn.config import Hub
from mdn.data.hub import STAMP, fetch
from mdn.evaluation.hub import HubSet
from mdn.evaluation.suites import NotRun

QASPER = HubSet("someone/Long", "test", ("context",), config="qasper")
FDA = HubSet("someone/based", "validation", ("text",))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "names",
    [
        ["qasper/test-00000-of-00002.parquet", "qasper/test-00001-of-00002.parquet"],
        ["qasper/test/0000.parquet", "qasper/test/0001.parquet"],
        ["qasper/long-1-qasper-test.parquet", "qasper/long-2-qasper-test.parquet"],
        ["data/qasper/test-00000.jsonl", "data/qasper/test-00001.jsonl"],
    ],
)
def test_a_configurations_files_are_found_in_order_and_no_others(tmp_path, names):
    folder = tmp_path / "hub/someone/Long"
    for number, name in enumerate(names):
        write(folder / name, [{"context": f"{number}"}])
    for other in ("qasper_e/test-00000.jsonl", "qasper/train-00000.parquet", "hotpotqa.jsonl"):
        write(folder / other, [{"context": "other"}])
    assert [item["context"] for item in QASPER.items(tmp_path)] == ["0", "1"]
    assert "missing" not in QASPER.digest(tmp_path)


def test_a_file_of_the_configurations_name_is_the_split(tmp_path):
    write(tmp_path / "hub/someone/Long/qasper.jsonl", [{"context": "Wärme", "all_classes": None}])
    write(tmp_path / "hub/someone/Long/qasper_e.jsonl", [{"context": "other"}])
    assert QASPER.items(tmp_path) == [{"context": "Wärme", "all_classes": None}]


@pytest.mark.parametrize("name", ["validation.jsonl", "data/validation-00000-of-00001.parquet"])
def test_a_set_without_configuration_is_found_by_its_split(tmp_path, name):
    write(tmp_path / "hub/someone/based" / name, [{"text": "t", "value": "v"}])
    write(tmp_path / "hub/someone/based/train.jsonl", [{"text": "other"}])
    assert FDA.items(tmp_path) == [{"text": "t", "value": "v"}]


def test_a_missing_set_says_what_brings_it(tmp_path):
    assert FDA.digest(tmp_path) == "missing"
    with pytest.raises(NotRun, match=r"data\.hub\.fetch.*data/raw/hub"):
        FDA.items(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"txt": "t"}\n', r"validation\.jsonl: an item has no 'text', only txt"),
        ("{", r"validation\.jsonl: not jsonl"),
        ("\n", r"validation\.jsonl: no items"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "hub/someone/based/validation.jsonl"
    write(path, [])
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        FDA.items(tmp_path)


def test_the_digest_follows_the_files(tmp_path):
    path = tmp_path / "hub/someone/based/validation.jsonl"
    write(path, [{"text": "a"}])
    before = FDA.digest(tmp_path)
    write(path, [{"text": "b"}])
    assert FDA.digest(tmp_path) != before


class TestFetch:
    @pytest.fixture
    def hub(self, tmp_path) -> Hub:
        write(tmp_path / "mirror/someone/based/validation.jsonl", [{"text": "t"}])
        return Hub(fetch=True, mirror=str(tmp_path / "mirror"), sets={"someone/based": "main"})

    def test_nothing_is_fetched_unless_asked_and_files_put_by_hand_stay(self, tmp_path, hub):
        write(tmp_path / "raw/hub/someone/based/validation.jsonl", [{"text": "by hand"}])
        folder = fetch(replace(hub, fetch=False), tmp_path / "raw")
        assert [path.name for path in folder.rglob("*.*")] == ["validation.jsonl"]
        assert FDA.items(tmp_path / "raw") == [{"text": "by hand"}]

    def test_a_mirror_is_copied_once(self, tmp_path, hub):
        fetch(hub, tmp_path / "raw")
        assert FDA.items(tmp_path / "raw") == [{"text": "t"}]
        stamp = tmp_path / "raw/hub/someone/based" / STAMP
        before = stamp.stat().st_mtime_ns
        said = []
        fetch(hub, tmp_path / "raw", said.append)
        assert stamp.stat().st_mtime_ns == before
        assert "already in" in said[0]

    def test_another_revision_is_fetched_anew(self, tmp_path, hub):
        fetch(hub, tmp_path / "raw")
        write(tmp_path / "mirror/someone/based/validation.jsonl", [{"text": "new"}])
        fetch(replace(hub, sets={"someone/based": "v2"}), tmp_path / "raw")
        assert FDA.items(tmp_path / "raw") == [{"text": "new"}]

    def test_what_a_mirror_lacks_is_said_and_the_rest_is_copied(self, tmp_path, hub):
        said = []
        fetch(replace(hub, sets={"someone/other": "main", **hub.sets}), tmp_path / "raw", said.append)
        assert said[0].startswith("someone/other: no such folder in ")
        assert [path.name for path in (tmp_path / "raw/hub/someone").iterdir()] == ["based"]

    def test_a_hub_that_cannot_be_reached_is_said_in_one_line(self, tmp_path, hub, monkeypatch):
        import huggingface_hub

        def refuse(*_, **__):
            raise RuntimeError("no\nnetwork")

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
        with pytest.raises(OSError, match=r"someone/based at main cannot be fetched \(no network\)"):
            fetch(replace(hub, mirror=None), tmp_path / "raw")

    @pytest.fixture
    def online(self, monkeypatch):
        """online(sha): a Hub on which every revision stands for that commit."""
        import huggingface_hub

        def at(sha: str) -> None:
            def snapshot(repository, *, repo_type, revision, local_dir, allow_patterns, ignore_patterns):
                assert (repository, repo_type, revision) == ("someone/based", "dataset", sha)
                write(local_dir / "validation.jsonl", [{"text": f"from {sha}"}])

            info = type("Info", (), {"sha": sha})
            monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, revision: info)
            monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)

        return at

    def test_a_revision_is_resolved_to_its_commit_which_is_told(self, tmp_path, hub, online):
        online("c0ffee")
        said = []
        fetch(replace(hub, mirror=None), tmp_path / "raw", said.append)
        assert FDA.items(tmp_path / "raw") == [{"text": "from c0ffee"}]
        assert json.loads((tmp_path / "raw/hub/someone/based" / STAMP).read_text())["commit"] == "c0ffee"
        assert said[-1] == "someone/based: main may move; data.hub.sets takes c0ffee"

    def test_a_revision_that_has_moved_is_refused_until_it_is_named(self, tmp_path, hub, online):
        online("c0ffee")
        fetch(replace(hub, mirror=None), tmp_path / "raw")
        online("decade")
        fetch(replace(hub, mirror=None), tmp_path / "raw")  # here already: the Hub is not asked
        with pytest.raises(OSError, match="at main is commit decade now, and c0ffee in "):
            fetch(replace(hub, mirror=None), tmp_path / "raw", again=True)
        assert FDA.items(tmp_path / "raw") == [{"text": "from c0ffee"}]
        fetch(replace(hub, mirror=None, sets={"someone/based": "decade"}), tmp_path / "raw")
        assert FDA.items(tmp_path / "raw") == [{"text": "from decade"}]
