"""From a folder of images to a better model: `vitmods improve`, and its page."""
