"""The published tables as data: one file per paper, read in the order of the files' names."""

from pathlib import Path

from vitmods.papers.table import read_paper

for _path in sorted(Path(__file__).parent.glob("*.toml")):
    read_paper(_path)
