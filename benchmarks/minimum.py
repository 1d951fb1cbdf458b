"""Print the lowest versions that pyproject.toml allows, as pins: `make minimum-lock`.

What users install is pinned: the dependencies and all extras but `dev`.
"""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
HEADER = "# The lowest versions that pyproject.toml allows; `make minimum-lock` writes this file\n"


def pins() -> str:
    """One `name==version` a line, sorted. Raises ValueError for a dependency without a plain lower bound."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    found: dict[str, str] = {}
    for line in [*project["dependencies"], *(one for name, part in extras.items() if name != "dev" for one in part)]:
        name, bound, version = line.partition(">=")
        if not bound or "," in version or found.setdefault(name, version) != version:
            raise ValueError(f"{line}: give one lower bound, name>=version, everywhere the same")
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


if __name__ == "__main__":
    print(pins(), end="")
