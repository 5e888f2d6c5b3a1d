"""Model families, free of any parallelism: single-device code that runs on whole tensors or on local shards.

``layers`` holds what families share, ``decoder`` the calls that each model has, ``llama3``, ``qwen3`` and
``gpt2`` a family each, ``registry`` the table of families and sizes, ``huggingface`` the same models as other
tools name them, ``initialization`` the random numbers, ``generation`` sampling. Imports torch only.
"""
