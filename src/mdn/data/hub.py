"""Evaluation sets that no package carries, copied from the Hub or from a local mirror.

data/raw/hub/<owner>/<name>/…          the repository's files, .parquet and .jsonl ones as they are there
data/raw/hub/<owner>/<name>/.fetched   revision, the commit it stood for, where from: nothing is left to do

Files that somebody puts there by hand stay as they are. Without `fetch` only the folder is made.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from mdn.config import Hub

FOLDER = "hub"  # below data/raw
STAMP = ".fetched"
WANTED = ["*.parquet", "*.jsonl", "*.md"]
UNWANTED = ["*train*"]  # nothing is trained on these sets


def fetch(hub: Hub, raw: Path, say: Callable[[str], None] = print, *, again: bool = False) -> Path:
    """The folder raw/hub with every repository of `hub.sets`, if `hub.fetch` asks for them. What a mirror
    lacks is left out. again: also those that are there already.

    Raises:
        OSError: if a repository cannot be fetched from the Hub, or if its revision now stands for another
            commit than that which is here.
    """
    folder = raw / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for repository, revision in hub.sets.items() if hub.fetch else ():
        target = folder / repository
        wanted, here = {"revision": revision, "mirror": hub.mirror}, _stamp(target)
        if not again and wanted.items() <= here.items():
            say(f"{repository}: already in {target}")
            continue
        if hub.mirror and not (Path(hub.mirror) / repository).is_dir():
            say(f"{repository}: no such folder in {hub.mirror}; its tasks will not run")
            continue
        commit = None if hub.mirror else _commit(repository, revision)
        if commit and here.get("revision") == revision and here.get("commit") not in (None, commit):
            raise OSError(
                f"data.hub.sets: {repository} at {revision} is commit {commit} now, and {here['commit']} in "
                f"{target}; write the one that you want as its revision"
            )
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
            new = Path(temporary) / "set"
            if commit:
                _download(repository, commit, new)
            else:
                shutil.copytree(Path(str(hub.mirror)) / repository, new)
            (new / STAMP).write_text(json.dumps({**wanted, "commit": commit}, indent=1))
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                target.rename(Path(temporary) / "old")
            new.rename(target)
        say(f"{repository}: {f'commit {commit}' if commit else f'from {hub.mirror}'}, in {target}")
        if commit and commit != revision:
            say(f"{repository}: {revision} may move; data.hub.sets takes {commit}")
    return folder


def _stamp(target: Path) -> dict[str, str | None]:
    """What `fetch` wrote about a set; nothing of one that is not there, or was put there by hand."""
    try:
        return dict(json.loads((target / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _commit(repository: str, revision: str) -> str:
    """The commit that a revision stands for today."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except Exception as error:
        raise _unreachable(repository, revision, error) from None


def _download(repository: str, commit: str, target: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=commit,
            local_dir=target,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    except Exception as error:
        raise _unreachable(repository, commit, error) from None


def _unreachable(repository: str, revision: str, error: Exception) -> OSError:
    """For the library's own errors, and those of the HTTP client below it."""
    return OSError(
        f"data.hub.sets: {repository} at {revision} cannot be fetched ({' '.join(str(error).split())}); "
        "check name and network, or name a local copy in data.hub.mirror"
    )
