"""The recipes of papers; each file registers its own."""
