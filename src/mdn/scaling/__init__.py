"""How training holds up from one GPU of a host to all of them: what `mdn plan` and a budget rest on."""
