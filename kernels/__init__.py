"""Fused optimizer kernels: one mainloop x one epilogue x one codec.

    epilogues   update rules on a tile, each in Triton and (`references`) in torch
    codecs      how weights and states are stored: fp32, bf16, stochastic rounding, int8, fp8; on a GPU by
                `codec_arithmetic`
    wgrad       weight gradient and update in one kernel, also for experts
    embedding   the same for embedding rows
    vector      one vector whose gradient lies in memory: a norm's weight, a bias
    flat        the same epilogues over many tensors whose gradients lie in memory
    squares     sums of squares of the states that such a launch writes
    forms       of the weight-gradient kernel, which run where; `check_forms` checks the Hopper ones on a card
    config      which form and tile shape a launch takes; `autotune` finds a better one

And what rules of whole matrices need:

    row_norm_update, apply_update  RMNP's update, and the write of updates, of many weights at once
    newton_schulz                  Muon's iteration, by products of half the work (`symmetric`)
    block_basis                    Dobb's update of many weights at once
    outer_products                 Dobb's capture: sums of outer products of activations
    second_moments, cholesky_qr    Dobb's refresh: statistics, and bases from them
    planes                         products of fp32 values by bf16 tensor cores, for these two

And between ranks:

    exchange_codes  what they sum in few bits: encode, sum, decode

Nothing here knows of models, modules or meshes: tensors in, tensors changed in place.
"""
