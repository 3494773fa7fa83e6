"""`lab.check`: tests the reader's answer to an exercise and prints a hint. An unfilled stub is not a failure."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Test = tuple[Sequence[Any], Any] | Callable[[Any], Any]


def check(answer: Any, *tests: Test, hint: str = "") -> bool | None:
    """Run `answer` on each test; print the first failure, with the hint. Never raises.

    A test is `(arguments, expected)`, or a function of the answer that returns True on success and otherwise returns
    a message or fails an assertion. Returns True or False; None for an unfilled stub: `...`, None, a function with
    body `...`, or one that raises NotImplementedError.
    """
    if unfilled(answer):
        print("… Not filled in yet." + (f" Hint: {hint}" if hint else ""))
        return None
    for number, test in enumerate(tests, 1):
        try:
            problem = _try(answer, test)
        except NotImplementedError:
            print("… Not filled in yet." + (f" Hint: {hint}" if hint else ""))
            return None
        except AssertionError as error:
            problem = str(error) or "an assertion failed"
        except Exception as error:
            problem = f"it raised {type(error).__name__}: {error}"
        if problem:
            print(f"✗ Not yet (test {number} of {len(tests)}): {problem}")
            if hint:
                print(f"  Hint: {hint}")
            return False
    print(f"✓ Right: {len(tests)} of {len(tests)} tests pass.")
    return True


def unfilled(answer: Any) -> bool:
    """Whether this is a stub: None, `...`, or a function with only a docstring and `...` as body."""
    if answer is None or answer is Ellipsis:
        return True
    code = getattr(answer, "__code__", None)
    if code is None:
        return False

    def empty() -> None: ...

    def documented() -> None:
        """A docstring."""
        ...

    return code.co_code in (empty.__code__.co_code, documented.__code__.co_code) and all(
        c is None or c is Ellipsis or (i == 0 and isinstance(c, str)) for i, c in enumerate(code.co_consts)
    )


def _try(answer: Any, test: Test) -> str:
    """The error message; "" if the test passes."""
    if callable(test):
        verdict = test(answer)
        if verdict is True or verdict is None:
            return ""
        return verdict if isinstance(verdict, str) else "the result is not right"
    arguments, expected = test
    got = answer(*arguments)
    if got is None or got is Ellipsis:
        raise NotImplementedError
    if _same(got, expected):
        return ""
    shown = ", ".join(map(_brief, arguments))
    return f"for ({shown}) it gives {_brief(got)}, not {_brief(expected)}"


def _same(got: Any, expected: Any) -> bool:
    import torch

    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            return False
        close = torch.allclose(got.double(), expected.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        return got.dtype == expected.dtype and close
    if isinstance(expected, float):
        return isinstance(got, int | float) and math.isclose(got, expected, rel_tol=1e-6)
    if isinstance(expected, tuple | list):
        return isinstance(got, tuple | list) and len(got) == len(expected) and all(map(_same, got, expected))
    return bool(got == expected)


def _brief(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() > 8:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {'x'.join(map(str, value.shape))} {dtype} tensor"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
