"""Sphinx's settings for the documentation site. ``make docs`` builds it; ``scripts/build_site.py`` says how."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parents[1]))  # for scripts.site_extension

project = "lockstep"
author = "The lockstep authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "scripts.site_extension",  # which reads docstrings by sphinx.ext.napoleon
]

# Every reference leads somewhere. Types in signatures that are lockstep's own and not public are shown as they are.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class|py:obj", r"lockstep\.\w+\.(\w+\.)?[A-Z]\w*"),
    ("py:class", "CheckFinite|CommHook|CompareEvery|Criterion|Device|OutputDim|Precision"),
    ("py:class", "InteractiveShell"),  # IPython's
    # What torch's pages do not explain.
    ("py:class", r"(torch\.distributed\.distributed_c10d|dist)\.ProcessGroup"),
    ("py:class", r"torch\.nn\.modules\.batchnorm\._BatchNorm|torch\.utils\.hooks\.RemovableHandle"),
]

# Names of torch and Python, from lists that are kept here: building asks no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", str(_HERE / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable/", str(_HERE / "torch.inv")),
}

myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
smartquotes = False  # they would make a dash of the two in "--grace"

# Both have a contrast of 4.5 and more.
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"
html_theme = "furo"
html_title = "lockstep"
html_static_path = [str(_HERE / "style.css")]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
# Only what a reader would type: outputs have no button.
copybutton_selector = ", ".join(f"div.highlight-{language} pre" for language in ("python", "bash", "yaml"))
