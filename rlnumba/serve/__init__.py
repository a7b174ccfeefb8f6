"""HTTP: the page of `watch`. The packages of extra `serve`, starlette and uvicorn, are imported here alone."""
