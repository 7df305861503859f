"""Context parallelism: splits sequences into chunks, and distributes the chunks over the ranks.

Dims of shapes such as [n, h, l, d]:

    n   samples of a micro-batch
    h   heads: all heads before an exchange, and the heads of one chunk after an exchange
    l   positions: those of one chunk before an exchange, and those of the full sequence after an exchange
    d   channels per head
"""
