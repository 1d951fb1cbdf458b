"""The published tables of one paper a file."""
