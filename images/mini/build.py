"""Write desk/reference/: `python images/mini/build.py [--check]`.

Makes a topic of each fact of docs/reference/ for the corpus of the help desk. `--check` writes nothing and ends with
status 1 where a file is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipe import generated, references

FOLDER = Path(__file__).resolve().parent / "desk" / "reference"


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of files that are not what the references give now."""
    wanted = generated.pages(references.read())
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main() -> None:
    """Write or check every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a file is stale")
    if parser.parse_args().check:
        names = stale()
        print("".join(f"stale: desk/reference/{name}\n" for name in names), end="", file=sys.stderr)
        sys.exit(1 if names else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = generated.pages(references.read())
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
