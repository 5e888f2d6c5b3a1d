"""Dobb: momentum normalised in block-diagonal eigenbases of second moments (arXiv 2610.39412)."""
