"""`lab.Growing`: a module that the cells of a notebook write, step by step."""

import ast
import difflib
import inspect
import json
import linecache
from collections.abc import Iterable
from pathlib import Path

from reflib.errors import LabError
from reflib.lab.machine import ROOT
from reflib.lab.showing import HtmlTable, Listing, display_thing

CALL = ".step("  # `mini.step("trace")`, the first line of a cell that is a step


class Growing:
    """The text of a module. Each step is a cell: its definitions are added, or replace those of the same name.

    A cell that begins with `mini.step("fuse")` is a step of `mini`; the cell also runs as usual, so that the notebook
    has the same functions. Running it again replaces what it added. A step in several cells has titles such as
    "print: templates" and "print: rounds". `continues`: begin with the steps of that notebook.
    """

    def __init__(self, name: str, continues: str = "") -> None:
        self.name = name
        self._steps = steps_in(continues) if continues else {}  # title -> the cell's text

    def step(self, title: str, source: str | None = None) -> None:
        """Take in the running cell (or `source`), and show what it changed in the lines that were there."""
        before = self.text
        self._steps[title] = without_call(running_cell() if source is None else source)
        after = self.text
        number = list(dict.fromkeys(map(step_of, self._steps))).index(step_of(title)) + 1
        counts = f"{code_lines(before)} lines of code before, {code_lines(after)} now"
        print(f"{self.name}.py, step {number}, {title}: {counts}")
        if changed := difference(before, after):
            display_thing(Listing(f"replaced in {self.name}.py", changed, "diff"))

    @property
    def text(self) -> str:
        """The module after the steps so far."""
        return grown(self._steps.values())

    def after(self, title: str) -> str:
        """The module as it was after the step with this title. LabError if there is none."""
        last = max((n for n, t in enumerate(self._steps) if title in (t, step_of(t))), default=None)
        if last is None:
            raise LabError(f"no step {title!r}; there are: {', '.join(self._steps)}")
        return grown(list(self._steps.values())[: last + 1])

    def before(self, title: str) -> str:
        """The module as it was before that step; "" before the first."""
        self.after(title)  # such a step there is
        first = min(n for n, t in enumerate(self._steps) if title in (t, step_of(t)))
        return grown(list(self._steps.values())[:first])

    def write(self, folder: Path) -> Path:
        """Write the module to a file in the folder."""
        path = Path(folder) / f"{self.name}.py"
        path.write_text(self.text, encoding="utf-8")
        return path

    def table(self) -> HtmlTable:
        """A line per step: lines of code that are new in it, and in all."""
        rows: list[tuple[object, ...]] = []
        for title in dict.fromkeys(map(step_of, self._steps)):
            written = sum(code_lines(text) for t, text in self._steps.items() if step_of(t) == title)
            rows.append((len(rows) + 1, title, written, code_lines(self.after(title))))
        return HtmlTable(["step", "what", "lines written", "lines of the module"], rows)


def steps_in(slug: str) -> dict[str, str]:
    """The steps of a notebook beside the running one, or of the checkout. LabError if it is in neither place."""
    for folder in (Path.cwd(), ROOT / "notebooks"):
        if (path := folder / f"{slug}.ipynb").exists():
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            return steps_of(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])
    raise LabError(f"{slug}.ipynb is not here: this notebook continues its module, so put it into the same folder")


def steps_of(cells: list[str]) -> dict[str, str]:
    """title -> text, of those of a notebook's code cells that are steps."""
    found = {}
    for cell in cells:
        first, _, rest = cell.partition("\n")
        if CALL in first and first.endswith('")'):
            found[first.split('"')[1]] = rest
    return found


def step_of(title: str) -> str:
    """The step of a cell's title, without what tells its cells apart."""
    return title.partition(":")[0]


def without_call(cell: str) -> str:
    return cell.partition("\n")[2] if CALL in cell.partition("\n")[0] else cell


def running_cell() -> str:
    """The text of the cell that calls `step`. LabError outside a notebook."""
    caller = inspect.currentframe()
    while caller is not None and caller.f_globals.get("__name__") == __name__:
        caller = caller.f_back
    lines = linecache.getlines(caller.f_code.co_filename) if caller else []  # IPython puts its cells there
    if not lines or CALL not in lines[0]:
        raise LabError("a step is a cell of a notebook; elsewhere give its text: step(title, source)")
    return "".join(lines)


def parts(source: str) -> dict[str, str]:
    """name -> text of the statements at the top level; what has no name has its own text as its name."""
    lines, found, start = source.splitlines(), {}, 0
    for node in ast.parse(source).body:
        text = "\n".join(lines[start : node.end_lineno]).strip("\n")
        found[name_of(node) or text] = text
        start = node.end_lineno or start
    return found


def name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def grown(steps: Iterable[str]) -> str:
    """The texts as one module: imports first, and of several definitions of one name the last, where the first was."""
    imports: list[str] = []
    body: dict[str, str] = {}
    for text in steps:
        for name, part in parts(text).items():
            if part.lstrip().startswith(("import ", "from ")):
                imports += [line for line in part.splitlines() if line and line not in imports]
            else:
                body[name] = part
    straight = sorted(imports, key=lambda line: (line.startswith("from "), line))
    chunks = []
    for part in body.values():
        defines = part.lstrip().startswith(("def ", "class ", "@"))
        chunks.append(f"\n\n{part}\n\n" if defines else part)
    text = "\n".join([*straight, "", *chunks])
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text.strip("\n") + "\n" if text.strip() else ""


def difference(before: str, after: str) -> str:
    """A diff of the definitions that both have, and that changed."""
    old, new = parts(before), parts(after)
    told = []
    for name in old:
        if name in new and old[name] != new[name]:
            lines = difflib.unified_diff(old[name].splitlines(), new[name].splitlines(), n=9, lineterm="")
            told += list(lines)[3:]
    return "\n".join(told)


def code_lines(source: str) -> int:
    """Lines of code, without blank ones, comments and docstrings."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for n, line in lines if line.strip() and not line.strip().startswith("#") and n not in docstrings)
