"""Context parallelism: splits sequences into chunks and distributes the chunks over the ranks.

The letters of shapes such as [n, h, l, d]:

    N   samples of a micro-batch
    H   heads: all heads before an exchange, the heads of one chunk after it
    L   positions: the positions of one chunk before an exchange, of the whole sequence after it
    D   channels per head
"""
