"""HTTP: a server on the engine with the routes and bodies of OpenAI's API and of vLLM's, and the page of runs.

process.py      the process: a socket, the engine in the main thread, uvicorn in a second one, the end by a signal
engine_loop.py  the main thread: requests become episodes, steps become deltas
jobs.py         one HTTP request between the two threads
admission.py    how many sequences may wait
app.py          routes, and who may call them
security.py     API key, Host, content type, size of a body, request ids
bodies.py       JSON bodies and the types of their keys
sampling.py     the keys of a body that become SamplingParams
completions.py  /v1/completions
chat.py         /v1/chat/completions
messages.py     messages as chat templates take them
token_level.py  /inference/v1/generate, /tokenize, /detokenize
logprobs.py     log-probs as the API writes them
streams.py      server-sent events; the end of a client
errors.py       errors as JSON
metrics.py      /metrics
settings.py     the options of `rlnumba serve`
watch/          the page of `rlnumba watch`

Nothing outside of this package imports starlette, uvicorn and prometheus_client, which are the extra `serve`.
"""
