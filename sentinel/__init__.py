"""GPU Sentinel: watches a GPU fleet and moves work off hardware that goes wrong."""

__version__ = "0.1.0"
