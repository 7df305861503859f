"""Tensor parallelism: matrix products are split into chunks of features, and ranks share the chunks.

Shapes, by letters: `inputs_NI` has shape [n, i].

    N   rows: samples times positions            C   chunks of a region, of which a rank has some
    I   inputs of a layer                        E   entries of a table, or of logits
    O   outputs of a layer, of one chunk         D   features of a row of a table, or of an expert
    K   experts chosen for a row                 P   pairs of a row and an expert of a group

If the inputs of a layer are split, I are the inputs of one chunk. Weights have torch's layout: weight_OI.
"""
