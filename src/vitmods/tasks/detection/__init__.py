"""Object detection and instance segmentation: tasks, heads, data views, sources and recipes, imported by name."""
