"""Mathematics of the update rules in numpy, for evaluation and figures alike."""
