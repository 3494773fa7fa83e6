"""Starts programs that run Triton's interpreter, which has to be chosen before Triton is imported."""

import functools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forking import INTERPRETER, ask, server

TESTS = Path(__file__).parent


def interpreted(*words: str, **env: str) -> str:
    """What a program prints ("-c" and its text, or a file of this folder, and its arguments)."""
    more, way = INTERPRETER
    words = words if words[0] == "-c" else (str(TESTS / words[0]), *words[1:])
    code, out, errors = ask(server(*more, **way), [*words], os.environ | way | env)
    assert code == 0, errors[-3000:]
    return out


@functools.cache
def results(program: str, *cases: str) -> dict[str, Any]:
    """What a program of this folder prints last, which is JSON. All its ``cases`` (none: all it has) run in one
    process."""
    return json.loads(interpreted(program, *cases).splitlines()[-1])


def answer(main: Callable[..., Any], *args: Any) -> None:
    """Of such a program: prints what ``main`` returns. What the interpreter lacks is given to it first."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    from reflib.lab.triton_child import complete_the_interpreter

    complete_the_interpreter()
    torch.set_num_threads(1)
    print(json.dumps(main(*args)))


def told(problem: Callable[..., str], *args: Any) -> str:
    """What ``problem`` says, or the error that it raises."""
    try:
        return problem(*args)
    except Exception as e:
        return f"{type(e).__name__}: {e}\n{traceback.format_exc()[-1500:]}"


def chosen(request: pytest.FixtureRequest) -> list[Any]:
    """The parameter of each variant of this test that is to run: they share one child."""
    node = request.node
    tests = [i for i in request.session.items if getattr(i, "originalname", "") == node.originalname]
    return [next(iter(i.callspec.params.values())) for i in tests if i.path == node.path]  # type: ignore[attr-defined]
