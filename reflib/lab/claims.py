"""`lab.claim`: tests a sentence of the chapter on the reader's machine."""

from reflib.lab.recording import OFF, recorded_claim
from reflib.lab.rows import append

WITHIN = 0.25  # of a prediction: further off, in either direction, it has failed


def claim(text: str, condition: object, *, otherwise: str) -> None:
    """Print whether `text` holds on this machine; `otherwise` explains why it might not.

    Put this device's numbers into `text` with an f-string. `condition` is anything with a
    truth value; None means it could not be measured here, or is about another kind of device, which counts as neither.
    What does not hold here is followed by what the chapter's recording says of it, if that was made elsewhere.
    """
    holds = None if condition is None else bool(condition)
    record = {"kind": "claim", "claim": text, "otherwise": otherwise}
    append([record if holds is None else {**record, "holds": holds}])
    if holds is None:
        print(f"? Not decided here: {text}\n  {otherwise}")
    elif holds:
        print(f"✓ Holds here: {text}")
    else:
        print(f"✗ Does not hold here: {text}\n  Why: {otherwise}")
    if not holds and (told := recorded_claim(text, otherwise)):
        print(f"  {told}")


def as_predicted(text: str, measured: float | None, predicted: float | None, *, otherwise: str) -> None:
    """A claim that a measured number is the predicted one, within a quarter of it.

    What is better than predicted fails as well: then the prediction lacks something, and `otherwise` says what. None
    means that it could not be measured here.
    """
    if measured is None or predicted is None:
        claim(text, None, otherwise=otherwise)
        return
    holds = abs(measured - predicted) <= WITHIN * predicted
    if not holds:
        otherwise = f"{'less' if measured < predicted else 'more'}{OFF}{otherwise}"
    claim(f"{text}: {measured:.2f}, predicted {predicted:.2f}", holds, otherwise=otherwise)
