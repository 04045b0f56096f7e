"""How published models store what our decoder has: names, shapes and order of rows.

`layout_of` gives the layout of a decoder. table.py says what a layout is, and decoder.py what the
layouts read off a decoder.
"""

from fla_cp.integrations.layouts.choice import layout_of
from fla_cp.integrations.layouts.table import Layout

__all__ = ["Layout", "layout_of"]
