"""Exit codes of a run; 0 is success."""

FAILED = 1
"""The parity check failed, or an exception was raised."""

MISTAKE = 2
"""The user asked for something impossible, or the last checkpoint could not be written."""

DIVERGED = 3
"""Training diverged. A restart from its last checkpoint would end in the same way."""

HUNG = 4
"""The run hung, or this rank lost its connection to another rank."""
