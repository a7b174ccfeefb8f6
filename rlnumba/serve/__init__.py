"""HTTP: a server on the engine with the routes and bodies of OpenAI's API and of vLLM's, and the page of runs.

process.py      the process: a socket, the engine in the main thread, uvicorn in a second one, the end by a signal
engine_loop.py  the main thread: requests become episodes, steps become deltas
control.py      what a trainer may do to the engine between two steps
jobs.py         one HTTP request between the two threads
admission.py    how many sequences may wait
app.py          which path is which route, and the errors of all
security.py     API key, Host, content type, size of a body, request ids
service.py      the state that the routes share
metrics.py      /metrics
settings.py     the options of `rlnumba serve`
routes/         /v1/completions, /v1/chat/completions, token ids in and out, control by a trainer
protocol/       bodies and the types of their keys, answers, server-sent events, log-probs, errors
watch/          the page of `rlnumba watch`

Nothing outside of this package imports starlette, uvicorn and prometheus_client, which are the extra `serve`.
"""
