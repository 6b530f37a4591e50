"""Run folders as they were at a git revision: dvc.lock says which contents they had, DVC's cache has them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from mdn.reports.runs import Run, read_run

RECORD = ("config.yaml", "manifest.json", "log.jsonl", "metrics.json", "evaluation/*")  # not the weights


@dataclass(frozen=True)
class Revision:
    """runs: by "scale/name"."""

    params: dict[str, Any]
    runs: dict[str, Run]


@contextmanager
def revision(rev: str) -> Iterator[Revision]:
    """params.yaml and the run folders of the present repository at `rev`, for as long as the context lasts.

    Raises:
        ValueError: if git does not know the revision, or no run of it is in DVC's cache.
    """
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException
    from dvc.scm import SCMError

    with TemporaryDirectory() as folder:
        root, found = Path(folder), set()
        try:
            files = DVCFileSystem(".", rev=rev)
            params = OmegaConf.to_container(OmegaConf.create(files.read_text("params.yaml")))
            paths = files.find("runs")
        except (DvcException, SCMError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{rev}: neither a run folder nor a revision that can be read ({reason})"
            ) from None
        for path in paths:
            _, scale, name, *rest = Path(path).parts
            inside = "/".join(rest)
            # fnmatch's star takes slashes too: evaluation/metrics holds the same numbers again
            if not any(fnmatch(inside, kind) for kind in RECORD) or len(rest) > 2:
                continue
            try:
                content = files.read_bytes(path)
            except OSError:  # cleared from the cache, or its stage had not run then
                continue
            target = root / scale / name / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            found.add((scale, name))
        if not found:
            raise ValueError(
                f"{rev}: no run folder of it is in DVC's cache; commit dvc.lock after `dvc repro`, and fetch "
                "or reproduce a revision of another machine"
            )
        for scale, name in found:
            _restore_failure(root / scale / name)
        assert isinstance(params, dict)
        runs = {f"{scale}/{name}": read_run(root, scale, name) for scale, name in sorted(found)}
        yield Revision({str(key): value for key, value in params.items()}, runs)


def _restore_failure(folder: Path) -> None:
    """failed.json is no output of a stage, since most trainings have none; the evaluations say it too."""
    said = "training failed: "
    for path in folder.glob("evaluation/*.json"):
        reason = str(json.loads(path.read_text()).get("failed", ""))
        if reason.startswith(said):
            (folder / "failed.json").write_text(json.dumps({"error": reason.removeprefix(said)}))
