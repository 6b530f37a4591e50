"""Groups of files: many processes in any order, kills at any point, and the bytes of one run."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from test_sources import write_rows
from tiny_vocabulary import write_tiny_vocabulary
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mdn.config import ConfigError, DataSet, Part
from mdn.data import groups, selection, shards
from mdn.data import prepare as module
from mdn.data.prepare import prepare, prepare_task, task
from mdn.data.shards import ShardWriter, open_split, read_index
from mdn.data.tokenization import encode

GROUP_BYTES = 900  # of the files below: groups within a part and across parts


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    monkeypatch.setattr(groups, "GROUP_BYTES", GROUP_BYTES)
    monkeypatch.setattr(groups, "GROUP_FILES", 2)


def documents_of(part: str) -> list[list[str]]:
    """The documents of each file of a part: some blank, some of which repeat others."""
    draw = random.Random(part)
    files = []
    for number in range(9):
        lines = [f"{part} {number} {n}" + " lower" * draw.randrange(8) for n in range(draw.randrange(1, 25))]
        files.append(
            [line for n, line in enumerate(lines) for line in ([line, ""] if n % 7 == 3 else [line])]
        )
    for number in range(0, 9, 3):
        files[number].append(files[8][-1])  # held out where the last are
    files[1].append("web 8 0" if part == "books" else files[8][-2])
    return files


PARTS = ("web", "books", "plain")


@pytest.fixture
def data(tmp_path):
    for part in PARTS:
        (tmp_path / "raw" / part).mkdir(parents=True)
        for number, lines in enumerate(documents_of(part)):
            (tmp_path / "raw" / part / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return DataSet(
        source="wheels",
        shard_tokens=400,
        parts=[
            Part(name="web", path="web/*", format="lines", holdout=0.3),
            Part(name="books", path="books/*", format="lines", holdout=0.02),
            Part(name="plain", path="plain/*", format="lines"),
        ],
    )


@pytest.fixture
def settings(tmp_path, tiny):
    return {
        "raw": tmp_path / "raw",
        "tokens": tmp_path / "tokens",
        "made": tiny,
        "watch": lambda *_: None,
        "code": "1",
        "say": lambda _: None,
    }


@pytest.fixture
def wanted(data, settings, tmp_path):
    """The files of the set as one process makes it."""
    prepare("mine", data, **settings | {"tokens": tmp_path / "wanted"})
    return contents(tmp_path / "wanted" / "mine")


@pytest.fixture
def encoded(monkeypatch):
    """The texts that are tokenized from now on."""
    texts = []
    monkeypatch.setattr(module, "encode", lambda made, batch: texts.extend(batch) or encode(made, batch))
    return texts


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(settings, name="mine") -> bool:
    """Whether the set is there and nothing beside it."""
    return [path.name for path in settings["tokens"].iterdir()] == [name]


def made_groups(settings) -> list[Path]:
    return sorted(path for path in settings["tokens"].glob(".mine.partial/*/[0-9]*"))


def document_count(group: Path) -> int:
    splits = json.loads((group / "group.json").read_text())["splits"]
    return sum(shard["documents"] for shards in splits.values() for shard in shards)


def texts_of(folder: Path, split: str, tiny) -> list[str]:
    return [tiny.decode(ids[:-1].tolist()) for ids in open_split(folder, split, verify=True).documents()]


def test_splits_across_groups_are_those_of_the_whole_parts(data, settings, tiny, tmp_path):
    index = prepare("mine", data, **settings)
    read = {part: [line for file in documents_of(part) for line in file if line] for part in PARTS}
    held = {part.name: int(len(read[part.name]) * part.holdout + 0.5) for part in data.parts}
    heldout = {part: read[part][len(read[part]) - held[part] :] for part in PARTS}
    everything_held = {text for texts in heldout.values() for text in texts}
    train = [
        text
        for part in PARTS
        for text in read[part][: len(read[part]) - held[part]]
        if text not in everything_held
    ]
    folder = tmp_path / "tokens" / "mine"
    assert texts_of(folder, "train", tiny) == train
    for part in ("web", "books"):
        assert texts_of(folder, f"heldout_{part}", tiny) == heldout[part]
    assert list(index["splits"]) == ["train", "heldout_web", "heldout_books"]
    for source in index["sources"]:
        part = source["name"]
        lines = [line for file in documents_of(part) for line in file]
        assert source["blank"] == lines.count("")
        assert source["heldout"]["documents"] == held[part]
        assert source["train"]["documents"] + source["repeated"] == len(read[part]) - held[part]
    assert sum(source["repeated"] for source in index["sources"]) > 3


def test_groups_cut_the_files_in_order_and_do_not_exceed_their_size(data, tmp_path):
    made = groups.groups("mine", data, tmp_path / "raw")
    assert len(made) > 6
    sizes = [size for _, _, size, _ in made.files]
    cuts, room = 0, -1
    for size in sizes:
        if size > room:
            cuts, room = cuts + 1, GROUP_BYTES
        room -= size
    assert len(made) == cuts
    assert [name for _, name, *_ in made.files] == [f"{part}/{n}.txt" for part in PARTS for n in range(9)]


@pytest.mark.parametrize("tasks", [1, 2, 5, 40])
def test_tasks_in_any_order_make_the_set_of_one_process(data, settings, wanted, encoded, tasks):
    for number in random.Random(tasks).sample(range(tasks), tasks):
        prepare_task("mine", data, task(f"{number}/{tasks}"), **settings)
    assert not (settings["tokens"] / "mine").exists()
    encoded.clear()
    prepare("mine", data, **settings)
    assert not encoded  # only put together
    assert contents(settings["tokens"] / "mine") == wanted
    assert finished(settings)


def test_what_tasks_left_out_is_made_and_finished_groups_are_counted(data, settings, wanted, encoded):
    said = []
    prepare_task("mine", data, task("1/3"), **settings)
    assert encoded
    there = len(made_groups(settings))
    index = prepare("mine", data, **settings | {"say": said.append})
    assert contents(settings["tokens"] / "mine") == wanted
    assert len(encoded) == sum(split["documents"] for split in index["splits"].values())  # none twice
    assert said == [f"mine: {there} of {len(groups.groups('mine', data, settings['raw']))} groups are there"]


CHILD = """
import sys, time
from pathlib import Path
from mdn.config import DataSet, Part
from mdn.data import groups, prepare
from mdn.data.tokenization import encode, tokenizer

data, files, raw, tokens, last = eval(sys.argv[1])
groups.GROUP_BYTES = {size}

def stops(made, texts):
    if len(list(Path(tokens).glob(".mine.partial/*/[0-9]*"))) == last:
        print("here", flush=True)
        time.sleep(1000)
    return encode(made, texts)

prepare.encode = stops
made = tokenizer(Path(tokens).parent / "vocabulary", files)
prepare.prepare("mine", data, raw=Path(raw), tokens=Path(tokens), made=made, watch=lambda *_: None, code="1")
"""


def test_a_killed_process_costs_the_group_at_work(data, settings, wanted, encoded, tmp_path):
    files = write_tiny_vocabulary(tmp_path / "vocabulary")
    for last in (0, 1, 4):  # each goes on where the one before was killed
        given = repr((data, files, str(settings["raw"]), str(settings["tokens"]), last))
        command = [sys.executable, "-c", CHILD.format(size=GROUP_BYTES), given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert "here\n" in iter(child.stdout.readline, "")
            child.kill()
        assert child.returncode == -signal.SIGKILL
        assert len(made_groups(settings)) == last
        assert not (settings["tokens"] / "mine").exists()
    prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted
    assert finished(settings)
    assert len(encoded) < sum(
        split["documents"] for split in read_index(tmp_path / "wanted/mine")["splits"].values()
    )


def killed(step: int, work) -> bool:
    """Whether a process that does `work` was killed before its `step`-th change of names or folders."""
    child = os.fork()
    if child == 0:
        steps = count(1)

        def kills(call):
            def called(*arguments, **keywords):
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **keywords)

            return called

        try:
            for name in ("rename", "replace", "rmdir", "mkdir", "unlink"):
                setattr(os, name, kills(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_putting_together_survives_a_kill_at_any_point(data, settings, wanted, encoded, tmp_path):
    earlier = replace(data, parts=data.parts[1:])
    prepare("mine", earlier, **settings)
    before = contents(settings["tokens"] / "mine")
    for number in range(3):
        prepare_task("mine", data, task(f"{number}/3"), **settings)
    tokens = settings["tokens"].rename(tmp_path / "ready")
    encoded.clear()
    for step in count(1):
        shutil.copytree(tokens, settings["tokens"])
        stopped = killed(step, lambda: prepare("mine", data, **settings))
        if step % 3 == 0:  # and the one that goes on, too
            killed(step // 2, lambda: prepare("mine", data, **settings))
        assert (settings["tokens"] / "mine").exists() or (settings["tokens"] / ".mine.old").exists()
        if (settings["tokens"] / "mine").exists():
            assert contents(settings["tokens"] / "mine") in (before, wanted)
        prepare("mine", data, **settings)
        assert contents(settings["tokens"] / "mine") == wanted
        assert finished(settings)
        shutil.rmtree(settings["tokens"])
        if not stopped:
            break
    assert step > 2 * len(wanted)
    assert not encoded


def test_a_set_between_two_names_is_not_lost_by_an_error_of_the_next_run(data, settings, wanted):
    prepare("mine", data, **settings)
    (settings["tokens"] / "mine").rename(settings["tokens"] / ".mine.old")
    (settings["raw"] / "web" / "8.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted


def cut(group: Path) -> None:
    (group / "group.json").write_bytes((group / "group.json").read_bytes()[:-20])


@pytest.mark.parametrize(
    "harm",
    [
        cut,
        lambda group: (group / "group.json").unlink(),
        lambda group: (group / "group.json").write_text("[]"),
        lambda group: (group / "group.json").write_text('{"splits": {"train": [{}]}, "sources": []}'),
        lambda group: (group / "train-00000.bin").unlink(),
        lambda group: (group / "train-00000.idx").write_bytes(b""),
    ],
)
def test_a_damaged_group_is_made_again(data, settings, wanted, encoded, harm):
    prepare_task("mine", data, task("0/1"), **settings)
    encoded.clear()
    group = made_groups(settings)[2]
    documents = document_count(group)
    harm(group)
    prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted
    assert len(encoded) == documents > 0


def change_a_file(data, settings):
    path = settings["raw"] / "web" / "0.txt"
    time = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("web", "wow"))  # as long as before
    os.utime(path, ns=(time + 1, time + 1))
    return data, settings


@pytest.mark.parametrize(
    "change",
    [
        lambda data, settings: (replace(data, shard_tokens=200), settings),
        lambda data, settings: (replace(data, parts=data.parts[::-1]), settings),
        lambda data, settings: (data, settings | {"code": "2"}),
        lambda data, settings: (data, settings | {"made": Tokenizer(WordLevel({"all": 0}, "all"))}),
        change_a_file,
    ],
)
def test_groups_of_anything_else_are_not_taken_over(data, settings, encoded, tmp_path, change):
    prepare_task("mine", data, task("0/1"), **settings)
    everything = len(encoded)
    data, settings = change(data, settings)
    encoded.clear()
    prepare("mine", data, **settings)
    assert len(encoded) > everything / 2
    assert finished(settings)
    fresh = prepare("mine", data, **settings | {"tokens": tmp_path / "fresh"})
    assert contents(settings["tokens"] / "mine") == contents(tmp_path / "fresh" / "mine")
    assert fresh["digest"]


def test_an_unchanged_set_is_adopted_unless_forced(data, settings, wanted, encoded):
    said = []
    index = prepare("mine", data, **settings)
    times = {path: path.stat().st_mtime_ns for path in (settings["tokens"] / "mine").iterdir()}
    encoded.clear()
    assert prepare("mine", data, **settings | {"say": said.append}) == index
    prepare_task("mine", data, task("0/2"), **settings | {"say": said.append})
    assert said[0] == "mine: adopted, nothing has changed"
    assert said[1].startswith("mine: the set is finished; remove ")
    assert not encoded
    assert finished(settings)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    prepare("mine", data, **settings, force=True)
    assert encoded
    assert contents(settings["tokens"] / "mine") == wanted


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_set_is_made_again(data, settings, wanted, harm):
    prepare("mine", data, **settings)
    harm(settings["tokens"] / "mine" / "train-00003.bin")
    prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_costs_the_group_at_work(
    data, settings, wanted, encoded, monkeypatch, number
):
    errors = [OSError(number, "full")]

    def full(writer, ids, write=ShardWriter.write):
        if len(made_groups(settings)) == 2 and errors:
            raise errors.pop()
        write(writer, ids)

    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(OSError, match="no space is left; make room and repeat"):
        prepare("mine", data, **settings)
    (folder,) = (settings["tokens"] / ".mine.partial").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["00000", "00001", "survey.json"]
    there = sum(map(document_count, made_groups(settings)))
    encoded.clear()
    index = prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted
    assert len(encoded) == sum(split["documents"] for split in index["splits"].values()) - there


def test_two_processes_on_one_group_are_harmless(data, settings, wanted, monkeypatch):
    nested = []

    def also(made, texts):
        if not nested:  # another host makes all of it meanwhile
            with monkeypatch.context() as there:
                nested.append(there.setattr(shards.socket, "gethostname", lambda: "other"))
                prepare_task("mine", data, task("0/1"), **settings)
        return encode(made, texts)

    monkeypatch.setattr(module, "encode", also)
    prepare("mine", data, **settings)
    assert nested
    assert contents(settings["tokens"] / "mine") == wanted
    assert finished(settings)


def test_all_parts_are_surveyed_once(data, settings, monkeypatch):
    surveyed = []
    survey = selection.survey
    monkeypatch.setattr(
        selection, "survey", lambda name, *given: surveyed.append(name) or survey(name, *given)
    )
    for number in range(3):
        prepare_task("mine", data, task(f"{number}/3"), **settings)
    prepare("mine", data, **settings)
    assert surveyed == list(PARTS)


def test_a_damaged_survey_is_made_again(data, settings, wanted):
    prepare_task("mine", data, task("0/3"), **settings)
    (stored,) = settings["tokens"].glob(".mine.partial/*/survey.json")
    stored.write_text(stored.read_text()[:-30])
    prepare("mine", data, **settings)
    assert contents(settings["tokens"] / "mine") == wanted


def test_progress_of_a_restart_goes_from_nothing_to_all_that_is_missing(data, settings):
    prepare_task("mine", data, task("0/2"), **settings)
    seen = []
    prepare("mine", data, **settings | {"watch": lambda what, done, total: seen.append((what, done, total))})
    made = [(done, total) for what, done, total in seen if what.startswith("tokenizing")]
    assert len({total for _, total in made}) == 1
    assert [done for done, _ in made] == sorted(done for done, _ in made)
    repeated = 120  # at most: lines of `documents_of` that are left out
    assert made[0][0] < made[-1][1] / 2
    assert made[-1][1] - repeated <= made[-1][0] <= made[-1][1]


@pytest.mark.parametrize(
    "text", ["3/2", "2/2", "x", "0/0", "1", "", "-1/2", "1/2/3", "1.0/2", "0/", "/2", "²/3"]
)
def test_a_task_that_is_none_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"--task: .* is not I/N with I from 0 to N - 1; write for example 0/64"
    ):
        task(text)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [[f"document {file} {n} the lower" for n in range(20 + file)] for file in range(7)]
    (tmp_path / "hub").mkdir()
    for number, rows in enumerate(texts):
        write_rows(tmp_path / "hub" / f"train-{number}.jsonl", [*rows[:5], "", *rows[5:]])
    data = DataSet(
        source="huggingface", repository=str(tmp_path / "hub"), keep=0.5, holdout=0.2, shard_tokens=300
    )
    return data, [text for rows in texts for text in rows]


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_hub_set_is_the_same_for_any_number_of_tasks_and_that_of_its_hash(
    hub, settings, tiny, encoded, tasks
):
    data, texts = hub
    index = prepare("mine", data, **settings)
    expected = contents(settings["tokens"] / "mine")
    fates = list(selection.by_hash(texts, data.keep, data.holdout))
    for split, fate in (("train", "train"), ("heldout_mine", "heldout")):
        assert texts_of(settings["tokens"] / "mine", split, tiny) == [
            text for got, text in fates if got == fate
        ]
        assert len(index["splits"][split]["shards"]) >= 4
    assert index["sources"][0]["blank"] == 7
    assert index["sources"][0]["unselected"] == [fate for fate, _ in fates].count("unselected")
    shutil.rmtree(settings["tokens"])
    for number in range(tasks):
        prepare_task("mine", data, task(f"{number}/{tasks}"), **settings)
    assert len(made_groups(settings)) == 4  # of seven files
    encoded.clear()
    prepare("mine", data, **settings)
    assert not encoded
    assert contents(settings["tokens"] / "mine") == expected


def test_a_hub_set_estimates_its_whole_from_the_groups_so_far(hub, settings):
    seen = []
    prepare("mine", hub[0], **settings | {"watch": lambda what, done, total: seen.append((done, total))})
    *made, last = seen
    assert made[0][1] is None
    assert made[-1][0] == pytest.approx(made[-1][1], rel=0.5)
    assert last == (made[-1][0], made[-1][0])
