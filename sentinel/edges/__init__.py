"""All input and output."""
