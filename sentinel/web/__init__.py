"""The HTTP face: API, callbacks, metrics."""
