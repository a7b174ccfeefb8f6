"""The parts of a request beside its prompt, and of its completions beside their tokens.

stops.py               the ids and strings that end a completion, and its text
token_rules.py         logit_bias, allowed_token_ids and bad_words
structured_outputs.py  the grammar of a completion's text
grammars.py            the tokens that a grammar allows next
grammar_tokens.py      the tokenizer as llguidance takes it
lazy_list.py           fields that are lists, and are kept as arrays
logprobs.py            the likeliest tokens beside those drawn, and log-probs of prompts
text_stream.py         the text of a completion while it grows
streams.py             outputs of requests while they grow
"""
