"""Data sets that the papers use, and lists of them in the layouts that people have."""
