"""Sphinx configuration. Nothing here is fetched from elsewhere, and a reference that leads nowhere fails the build."""

from importlib.metadata import version as installed_version

project = "hookkit"
author = "The hookkit developers"
copyright = "The hookkit developers"
version = release = installed_version("hookkit")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

# No dollarmath: Sphinx's HTML writer shows mathematics with a script from a remote host.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_numpy_docstring = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

nitpicky = True
# Without inventories of other projects their names cannot be resolved.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|thunder)(\..*)?"),
    (r"py:.*", r"collections\.abc\..*"),
]

html_theme = "furo"
html_title = f"hookkit {release}"
