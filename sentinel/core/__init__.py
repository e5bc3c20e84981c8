"""Pure: no network, no disk, no clock, no randomness, no logging."""
