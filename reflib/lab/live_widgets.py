"""`lab.live`: measure again, with other values. It needs a kernel; the book shows what was measured last."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from reflib.errors import LabError
from reflib.lab.showing import display_thing


class Live:
    """What ``lab.live`` shows. ``result``: of the latest measurement. ``box``: the widgets, None without ipywidgets."""

    def __init__(self, measure: Callable[..., Any], choices: dict[str, list[Any]]) -> None:
        self.measure, self.choices = measure, choices
        self.chosen = {name: listed[0] for name, listed in choices.items()}
        self.result = measure(**self.chosen)
        self.box = _widgets(self) if _in_a_notebook() and importlib.util.find_spec("ipywidgets") else None

    def again(self, **changed: Any) -> Any:
        """Measure with other values; those that are not named stay."""
        self.chosen |= changed
        self.result = self.measure(**self.chosen)
        return self.result

    def __repr__(self) -> str:
        at = ", ".join(f"{name} = {value}" for name, value in self.chosen.items())
        return f"Measured at {at}. In Lab, move a slider to measure again.\n\n{self.result!r}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widgets for who has a kernel, the last measurement for everyone else."""
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        if self.box is not None:
            bundle |= {k: v for k, v in self.box._repr_mimebundle_().items() if k.startswith("application/")}
        return bundle


def live(measure: Callable[..., Any], **choices: Sequence[Any]) -> Live:
    """Show ``measure(name=value, ...)`` with a slider for each name over its values. It is called at once with the
    first of each, and again after every move. What it returns is shown: rows of ``lab.measure``, a table, a number.

    Without ipywidgets, or where no kernel listens, the first measurement is all there is, and that is said. Raises
    LabError for a name without values, whatever ``measure`` raises at once.
    """
    listed = {name: list(values) for name, values in choices.items()}
    if empty := [name for name, values in listed.items() if not values]:
        raise LabError(f"live: {', '.join(empty)} has no values to choose from")
    found = Live(measure, listed)
    display_thing(found)
    if found.box is None and _in_a_notebook():
        print("To move the sliders: pip install ipywidgets, and start the kernel again.")
    return found


def _in_a_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None


def _widgets(shown: Live) -> Any:
    """A slider a name, and below them what the latest measurement gave."""
    import ipywidgets as widgets
    from IPython.display import display

    wide = {"style": {"description_width": "initial"}, "layout": widgets.Layout(width="26em", max_width="95%")}
    sliders = {
        name: widgets.SelectionSlider(options=values, description=name, continuous_update=False, **wide)
        for name, values in shown.choices.items()
    }
    output = widgets.Output()
    # As data, not displayed into it: a client that plays the widget's part, as nbclient does, would answer the kernel
    # in the middle of the cell, and now and then neither goes on.
    output.append_display_data(shown.result)

    def moved(change: Any) -> None:
        output.clear_output(wait=True)
        with output:  # an error shows here, not in a log that nobody reads
            display(shown.again(**{name: slider.value for name, slider in sliders.items()}))

    for slider in sliders.values():
        slider.observe(moved, names="value")
    return widgets.VBox([*sliders.values(), output])
