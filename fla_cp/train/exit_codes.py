"""How a run ended, as its exit code says it; 0 is success."""

FAILED = 1
"""A failed parity check, or an exception."""

MISTAKE = 2
"""A mistake in what the user asked for, or a disk that cannot take the last checkpoint."""

DIVERGED = 3
"""Training diverged: starting it again from its last checkpoint would end in the same way."""

HUNG = 4
"""The run is hung, or this rank has lost another one."""
