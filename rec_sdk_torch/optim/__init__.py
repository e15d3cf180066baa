"""How tables get their optimizer, how TorchRec sees it, and the Accumulate optimizers."""
