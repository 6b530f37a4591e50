"""How fast the models are and what memory they take (the paper's Fig. 6): training, decoding, prefill."""
