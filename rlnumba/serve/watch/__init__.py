"""The page of `rlnumba watch`: the curves and completions of runs, read from their folders while they run.

step_lines.py   the lines of a step in a JSONL file of any size, by binary search
metrics.py      metrics.jsonl as columns, read on as it grows
run_view.py     the folder of a run: its state, metrics, completions, tokens
app.py          routes, API key, headers
listen.py       the socket, the server and its end
static/         the page: HTML, CSS, JavaScript

Nothing is written, and no file outside the folders of the runs is read.
"""
