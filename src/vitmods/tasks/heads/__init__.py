"""What a task puts beside the backbone, imported when a model is built: torchvision's models take half a second."""
