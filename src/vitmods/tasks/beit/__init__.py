"""BeiT: task, masks, codes, model and recipes. Files are imported when a name in them is used."""
