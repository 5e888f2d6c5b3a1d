"""The weight-gradient update in Gluon, for Hopper: persistent, warp-specialised forms of `wgrad_kernel`.

    pingpong     two consumer warpgroups take turns: one multiplies while the other updates (few tokens)
    slice_update its update of one slice
    row_scales   scales of two states found together, for it
    movers       the warps of pingpong that only move memory
    cooperative  eight warps multiply, four others update what they finished before (many tokens)
    slices       decode, epilogue and encode of a slice in registers, with the functions of the portable form
    pairs        the same between shared memory and the registers of an accumulator (ping-pong)
    words        the same from global memory, for rows (cooperative)
    launch       which launches a form takes, and how it is launched

Both sum G over tokens in the order of the portable form and call the same epilogues and codecs, so that all
forms agree bit for bit.
"""
