"""`lab.claim`: tests a sentence of the chapter on the reader's machine."""

from __future__ import annotations

from reflib.lab.rows import append


def claim(text: str, condition: object, *, otherwise: str) -> None:
    """Print whether `text` holds on this machine; `otherwise` explains why it might not.

    Put this device's numbers into `text` with an f-string. `condition` is anything with a
    truth value; None means it could not be measured here, which counts as neither.
    """
    holds = None if condition is None else bool(condition)
    record = {"kind": "claim", "claim": text, "otherwise": otherwise}
    append([record if holds is None else {**record, "holds": holds}])
    if holds is None:
        print(f"? Not measured on this machine: {text}\n  {otherwise}")
    elif holds:
        print(f"✓ Holds here: {text}")
    else:
        print(f"✗ Does not hold here: {text}\n  Why: {otherwise}")
