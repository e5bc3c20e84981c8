"""Catalogues: data with provenance per row."""
