"""Classification of token sequences: task, data, sources and recipes. Files are imported when a name is used."""
