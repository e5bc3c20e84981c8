"""A simulated fleet beside real servers: a tool to see and rehearse, never the proof by itself."""
