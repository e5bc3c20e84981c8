"""`sentinel doctor`: looks at all that a configuration names, and says what to fix first."""
