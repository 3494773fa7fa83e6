"""Numbers of the prose that nothing printed."""

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from reflib.lab.prose_numbers import unseen


def test_numbers_that_nothing_printed_are_listed() -> None:
    prose = (
        "It takes 12.9 µs where 17.9 are predicted, 1,048,576 times in `f(777)`, since 2011 ([#123](x/456)). "
        "On the H200 it is 489 µs, or 4.2 TB/s; a step is 3 times as fast, 40% of it."
    )
    printed = new_output("stream", name="stdout", text="12.9 and 1,048,576\n")
    book = new_notebook(cells=[new_markdown_cell(prose), new_code_cell("x = 40", outputs=[printed])])
    found = unseen(book, [{"value": 489.28}, {"value": None}])
    assert len(found) == 2 and "where 17.9 are" in found[0] and "a step is 3 times" in found[1]
