"""The pipeline strip under each chapter's title, with the chapter's stages highlighted."""

from reflib.errors import LabError

STAGES = ("capture", "ir", "lower", "fuse", "autotune", "schedule", "plan", "generate", "wrap", "package")


def strip(*lit: str) -> str:
    """Markdown for the strip. `strip("fuse")` highlights one stage, `strip()` none. LabError for an unknown stage."""
    unknown = [stage for stage in lit if stage not in STAGES]
    if unknown:
        raise LabError(f"no stage is called {unknown[0]!r}; there are {', '.join(STAGES)}")
    return " → ".join(f"**[{s}]**" if s in lit else s for s in STAGES)
