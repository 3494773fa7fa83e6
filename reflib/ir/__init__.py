"""The language of the compiler: index expressions, Loops, Programs; printer, verifier, interpreter, JSON."""
