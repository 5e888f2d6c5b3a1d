"""Layers that model families share. Each declares its own initial values (see ``models.initialization``).

Shape letters used as suffixes throughout ``models``:
B batch · T tokens of a sequence · N = B·T · D model width · H query heads · K key/value heads ·
E head width · F feed-forward width · V vocabulary.
"""
