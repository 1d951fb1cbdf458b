"""Semantic segmentation: task, data views, sources and recipes. Files are imported when a name in them is used."""
