"""LiT: contrastive training on image-text pairs. Task, towers, sources and recipes, imported when a name is used."""
