"""What made a number: digests of code and files, versions, commit, hardware."""

import ast
import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "fla-core",
    "lightning",
    "mlflow",
    "dvc",
    "lm_eval",
    "transformers",
    "tokenizers",
    "polars",
)
# These mirror, read, steer or describe results and do not compute them.
APART = (
    "mdn.tracking",
    "mdn.reports",
    "mdn.cli",
    "mdn.config",
    "mdn.files",
    "mdn.rules",
    "mdn.typed",
    "mdn.mqar.runner",
    "mdn.mqar.summary",
)


def code_digest(within: str = "") -> str:
    """Twelve hex digits of the source of every `mdn` and `mdn_kernels` module imported so far, or of those
    within one package.

    Mixers and kernel versions are imported when a model is built, so after building it the digest covers just
    what this model runs on. Comments, docstrings and layout do not count.
    """
    digest = hashlib.sha256()
    for name in sorted(sys.modules):
        source = getattr(sys.modules[name], "__file__", None)
        ours = name.split(".")[0] in ("mdn", "mdn_kernels") and not name.startswith(APART)
        if ours and source and name.startswith(within):
            digest.update(f"{name}\n{_bare(Path(source).read_text())}\n".encode())
    return digest.hexdigest()[:12]


def source_digest(*packages: str) -> str:
    """Twelve hex digits of the source of all modules of packages, whether imported or not."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder)}\n{_bare(path.read_text())}\n".encode())
    return digest.hexdigest()[:12]


def _bare(source: str) -> str:
    """The source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                body[0] = ast.Pass()
    return ast.unparse(tree)  # ast.dump differs from one Python to the next


def file_digest(path: Path) -> str:
    """Twelve hex digits of a file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def environment() -> dict[str, Any]:
    """Versions, commit and hardware, for a manifest. Where files were copied without their history, the
    variable MDN_COMMIT names the commit; MDN_GPU_SHARED_BY, how many trainings share the GPU."""
    import torch

    shared = os.environ.get("MDN_GPU_SHARED_BY")
    return {
        "commit": os.environ.get("MDN_COMMIT") or _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver() if torch.cuda.is_available() else None,
        **({"gpu_shared_by": int(shared)} if shared else {}),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        return None
    return done.stdout.strip()
