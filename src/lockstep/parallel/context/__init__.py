"""Sequences that are cut into chunks, and shared out.

Shapes, by letters: `query_NHLD` has shape [n, h, l, d].

    N   samples of a micro-batch      L   positions: of one chunk before an exchange, of the whole sequence after it
    H   heads: all of them before an exchange, those of one chunk after it           D   channels of a head
"""
