"""What a data pipeline can raise besides plain `ValueError` / `FileNotFoundError` about its arguments."""

from __future__ import annotations


class DataError(RuntimeError):
    """A record cannot be read; the message names the file and the line, row, or byte."""


class DataExhausted(DataError):
    """The data ended and `data.repeat` is false; the message names the dataset."""
