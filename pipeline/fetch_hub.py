"""Stage hub: the evaluation sets of data.hub, to data/raw/hub/<owner>/<name>."""

import argparse
import sys
from pathlib import Path

from mdn.config import ConfigError, load
from mdn.data.hub import fetch
from mdn.tracking.record import forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default="params.yaml")
    parser.add_argument("--raw", type=Path, default="data/raw")
    arguments = parser.parse_args()
    try:
        hub = load(arguments.params).data.hub
        folder = fetch(hub, arguments.raw, again=forced())
        # Of an empty folder DVC would warn in every stage that reads it.
        (folder / "README").write_text("<owner>/<name>/: by data.hub of params.yaml, or put here by hand\n")
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
