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


def fetch(hub: Hub, raw: Path, say: Callable[[str], None] = print) -> Path:
    """The folder raw/hub with every repository of `hub.sets`, if `hub.fetch` asks for them. What a mirror
    lacks is left out.

    Raises:
        OSError: if a repository cannot be fetched from the Hub.
    """
    folder = raw / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for repository, revision in hub.sets.items() if hub.fetch else ():
        target = folder / repository
        wanted = {"revision": revision, "mirror": hub.mirror}
        if _stamp(target) == wanted:
            say(f"{repository}: already in {target}")
            continue
        if hub.mirror and not (Path(hub.mirror) / repository).is_dir():
            say(f"{repository}: no such folder in {hub.mirror}; its tasks will not run")
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
            new = Path(temporary) / "set"
            commit = None
            if hub.mirror:
                shutil.copytree(Path(hub.mirror) / repository, new)
            else:
                commit = _download(repository, revision, new)
            (new / STAMP).write_text(json.dumps({**wanted, "commit": commit}, indent=1))
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                target.rename(Path(temporary) / "old")
            new.rename(target)
        say(f"{repository}: {f'commit {commit}' if commit else f'from {hub.mirror}'}, in {target}")
    return folder


def _stamp(target: Path) -> dict[str, str | None] | None:
    try:
        found = json.loads((target / STAMP).read_text())
        return {key: found[key] for key in ("revision", "mirror")}
    except (OSError, ValueError, KeyError):  # nothing there yet, or not what we wrote
        return None


def _download(repository: str, revision: str, target: Path) -> str:
    """The repository's files in `target`; the commit that the revision stands for today."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().dataset_info(repository, revision=revision).sha
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=commit,
            local_dir=target,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    except Exception as error:  # the library's own errors, and those of the HTTP client below it
        raise OSError(
            f"data.hub.sets: {repository} at {revision} cannot be fetched ({' '.join(str(error).split())}); "
            "check name and network, or name a local copy in data.hub.mirror"
        ) from None
    return str(commit)
