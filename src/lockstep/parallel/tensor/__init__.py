"""Tensor parallelism: splits matrix products into chunks of features, and distributes the chunks over ranks.

Shape suffixes: `inputs_NI` has shape [n, i].

    N   rows: samples times positions            C   chunks of a region, or this rank's chunks
    I   input features of a layer                E   entries of a table, or of logits
    O   output features of a layer or a chunk    D   features of a table row, or of an expert
    K   experts selected for a row               P   pairs of a row and an expert of a group

If the inputs of a layer are split, I is the number of input features of one chunk. Weights have the layout of
nn.Linear: weight_OI.
"""
