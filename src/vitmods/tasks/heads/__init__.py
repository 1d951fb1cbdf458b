"""Detectors and their pyramids, imported when one is built: torchvision's models take half a second."""
