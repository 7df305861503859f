"""Slicing of tensors: products cut into chunks of features, which ranks share.

Shapes, by letters: `inputs_NI` has shape [n, i].

    N   rows: samples times positions            C   chunks of a region; a rank has some of them
    I   inputs of a layer                        E   entries of a table, or of logits
    O   outputs of a layer, of one chunk         D   features of a row of a table, or of an expert
    K   experts chosen for a row                 P   pairs of a row and an expert that fall to a group

Where a layer's inputs are cut, I are those of one chunk. Weights lie as torch's do: weight_OI.
"""
