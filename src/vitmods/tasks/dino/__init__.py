"""DINO: task, model, data views and recipe. Files are imported when a name in them is used."""
