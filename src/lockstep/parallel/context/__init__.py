"""Context parallelism: splits sequences into chunks and distributes the chunks over the ranks.

Letters in shapes such as [n, h, l, d]:

    N   samples of a micro-batch
    H   heads: all heads before an exchange, and the heads of one chunk after an exchange
    L   positions: those of one chunk before an exchange, and those of the full sequence after an exchange
    D   channels per head
"""
