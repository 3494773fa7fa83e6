"""`lab.live`: sliders that measure again. They need a running kernel; the book shows the latest measurement."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from reflib.errors import LabError
from reflib.lab.showing import display_thing


class Live:
    """The output of ``lab.live``. ``result``: the latest measurement. ``box``: the widgets, None without ipywidgets."""

    def __init__(self, measure: Callable[..., Any], choices: dict[str, list[Any]]) -> None:
        self.measure, self.choices = measure, choices
        self.chosen = {name: listed[0] for name, listed in choices.items()}
        self.result = measure(**self.chosen)
        self.box = _widgets(self) if _in_a_notebook() and importlib.util.find_spec("ipywidgets") else None

    def again(self, **changed: Any) -> Any:
        """Measure with other values; unnamed ones stay unchanged."""
        self.chosen |= changed
        self.result = self.measure(**self.chosen)
        return self.result

    def __repr__(self) -> str:
        at = ", ".join(f"{name} = {value}" for name, value in self.chosen.items())
        return f"Measured at {at}. In Lab, move a slider to measure again.\n\n{self.result!r}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widgets for front ends with a kernel, else the latest measurement."""
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        if self.box is not None:
            bundle |= {k: v for k, v in self.box._repr_mimebundle_().items() if k.startswith("application/")}
        return bundle


def live(measure: Callable[..., Any], **choices: Sequence[Any]) -> Live:
    """Show the result of ``measure(name=value, ...)`` with one slider per name over its values. It is called at once
    with the first values, and again after each move. It may return anything displayable, such as rows or a table.

    Without ipywidgets or a running kernel, only the first measurement is shown, with a note. Raises LabError for a name
    without values, and the errors of the first ``measure`` call.
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
    """One slider per name, and below them the latest result."""
    import ipywidgets as widgets
    from IPython.display import display

    wide = {"style": {"description_width": "initial"}, "layout": widgets.Layout(width="26em", max_width="95%")}
    sliders = {
        name: widgets.SelectionSlider(options=values, description=name, continuous_update=False, **wide)
        for name, values in shown.choices.items()
    }
    output = widgets.Output()
    # The output is passed as data: displaying into the widget can deadlock with clients that emulate widgets, such as
    # nbclient, because they send messages to the kernel while the cell runs.
    output.append_display_data(shown.result)

    def moved(change: Any) -> None:
        output.clear_output(wait=True)
        with output:  # shows errors here, not in the kernel's log
            display(shown.again(**{name: slider.value for name, slider in sliders.items()}))

    for slider in sliders.values():
        slider.observe(moved, names="value")
    return widgets.VBox([*sliders.values(), output])
