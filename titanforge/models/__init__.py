"""Model families, free of any parallelism: single-device code that runs on whole tensors or on local shards.

``layers`` holds what families share, ``llama3`` one family, ``registry`` the table of families and sizes,
``initialization`` the random numbers, ``generation`` sampling. Imports torch only.
"""
