"""Read by every Python process that the tests start (tests/conftest.py puts this folder on PYTHONPATH)."""

import gc
import sys

# Looking through all that imports leave behind, again and again, takes a quarter of the time of importing Dynamo.
gc.set_threshold(100_000, 50, 1000)
# jsonschema imports it, where it is installed, for a format that is not asked for; that takes two seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
