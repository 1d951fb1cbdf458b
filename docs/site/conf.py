"""Sphinx's settings; build.py says where the pages come from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import vitmods

project = "vitmods"
version = release = vitmods.__version__
html_title = f"vitmods {release}"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "docstrings", "mathml"]

myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
default_role = "code"  # docstrings write `name`, as Markdown does

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
add_module_names = False

html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b62a4", "color-brand-content": "#0b62a4"},
    "dark_css_variables": {"color-brand-primary": "#6cb6f5", "color-brand-content": "#6cb6f5"},
}
