"""A backend for matplotlib on ranks that run cells: figures of rank 0 appear in the notebook, as with a kernel's own.

``MPLBACKEND`` names it there, so that matplotlib imports it. ``plt.show()`` shows all figures; figures that are open at
the end of a cell are shown then.
"""

from __future__ import annotations

import io

from matplotlib import _pylab_helpers, backend_bases
from matplotlib.backends import backend_agg

from lockstep.interactive import sink


class FigureManager(backend_bases.FigureManagerBase):
    """Shows figures where the cell's output goes."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003  (matplotlib passes it)
        """Show all open figures, and close them; matplotlib calls this for ``plt.show()``."""
        show_all()


class FigureCanvas(backend_agg.FigureCanvasAgg):
    """Draws into memory."""

    manager_class = FigureManager


def show_all() -> None:
    """Show all open figures, and close them."""
    try:
        for manager in _pylab_helpers.Gcf.get_all_fig_managers():
            if sink.show_png is not None:
                file = io.BytesIO()
                manager.canvas.figure.savefig(file, format="png", bbox_inches="tight")
                sink.show_png(file.getvalue())
    finally:
        _pylab_helpers.Gcf.destroy_all()
