"""Labelled results as pictures and as one self-contained page."""

from ..extras import require

require("plotly", "report", "pages and figures")
