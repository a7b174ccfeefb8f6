# The id of a row without a log-prob, as in torch.nn.functional.cross_entropy.
IGNORED = -100
