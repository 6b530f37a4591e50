"""Parts that several operators share."""
