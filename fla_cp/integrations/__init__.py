"""Models of other libraries under a context."""
