"""Stage debian: the packages of data.debian, to data/raw/debian/<package>."""

import argparse
import sys
from pathlib import Path

from mdn.config import ConfigError, load
from mdn.data.packages import fetch_debian


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default="params.yaml")
    parser.add_argument("--raw", type=Path, default="data/raw")
    arguments = parser.parse_args()
    try:
        folder = fetch_debian(load(arguments.params).data.debian, arguments.raw)
        # Of an empty folder DVC would warn in every stage that reads it.
        (folder / "README").write_text("<package>/: by data.debian of params.yaml\n")
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")
    except (ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
