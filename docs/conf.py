"""Sphinx configuration. Nothing here is fetched from elsewhere, and a reference that leads nowhere fails the build."""

import logging
import sys
import warnings
from pathlib import Path

import hookkit

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

logging.getLogger("hookkit").setLevel(logging.WARNING)  # a style of Pygments has the root logger print everything
warnings.filterwarnings("ignore", "transformer_engine module not found")  # thunder's, at its import

project = "hookkit"
author = "The hookkit developers"
copyright = "The hookkit developers"
version = release = hookkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "check_site",
    "behaviours_table",
    "contract_table",
    "diagrams",
    "higher_order_table",
    "mends",
    "operations_table",
    "plain_markdown",
    "printed",
    "public_names",
    "shipped_rules",
    "stacked_tables",
]
exclude_patterns = ["_build"]

# No dollarmath: Sphinx's HTML writer shows mathematics with a script from a remote host.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

nitpicky = True
# Without inventories of other projects their names cannot be resolved.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|thunder)(\..*)?"),
    (r"py:.*", r"collections\.abc\..*"),
    (r"py:.*", r"(typing\.)?(Any|Literal|TypeVar)"),
    (r"py:class", r"~?[PR]"),  # type variables
    (r"py:class", r"OpaqueRule"),  # to type checkers only: a Rule
    (r"py:class", r"None|bool|int|str|tuple|dict|type|RuntimeError|UserWarning"),
]

smartquotes_action = "D"  # dashes only: quotes stay what is typed

html_theme = "furo"
pygments_dark_style = "github-dark"  # Furo's own underlines names, as if they were links
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"hookkit {release}"
html_show_sphinx = False
html_copy_source = False
# Summaries are fetched, which a browser does not do for pages opened from disk.
html_show_search_summary = False
html_theme_options = {"navigation_with_keys": True}
