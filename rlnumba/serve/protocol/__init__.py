"""The form of requests and answers that the routes have in common, as OpenAI's API and vLLM's have it.

bodies.py    JSON bodies and the types of their keys
sampling.py  the keys of a body that become SamplingParams
grammar.py   the grammar of a text, or of calls that are forced
messages.py  messages as chat templates take them
answers.py   the head of an answer, its usage and its chunks
logprobs.py  log-probs
streams.py   server-sent events; the end of a client
errors.py    errors as JSON
"""
