"""Errors as the API answers them: {"error": {message, type, param, code}}."""

from starlette.responses import JSONResponse

# Status -> type, in OpenAI's words; clients choose their exceptions by them.
TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200. param: the key at fault, such as messages[0].role; code: for programs, or None."""

    def __init__(self, message, param=None, code=None, status=400, headers=None):
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.headers = status, headers

    @property
    def body(self):
        return error_body(self.status, self.message, self.param, self.code)

    @property
    def response(self):
        return JSONResponse(self.body, self.status, self.headers)


def error_body(status, message, param=None, code=None):
    """The JSON of an error."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": TYPES.get(status, default), "param": param, "code": code}}


def too_long(limit, num_prompt, num_completion, param):
    """The ApiError of a prompt that has no room, in the words that clients look for."""
    wanted = num_prompt + num_completion
    return ApiError(
        f"This model's maximum context length is {limit} tokens. However, you requested {wanted} tokens "
        f"({num_prompt} in the prompt, {num_completion} in the completion). Please reduce the length of either.",
        param,
        "context_length_exceeded",
    )


def no_model(name, known=()):
    """The ApiError of a model that is not served."""
    others = f"; this server has {', '.join(known)}" if known else ""
    return ApiError(f"The model `{name}` does not exist{others}", "model", "model_not_found", 404)


def weights_changed():
    """The ApiError of a request whose tokens were drawn with weights that are no longer there, and are needed again.

    Clients of OpenAI's send a request again at 409.
    """
    message = "the weights were replaced while this request was answered, and its tokens have to be drawn again: retry"
    return ApiError(message, code="weights_replaced", status=409)


def internal_error():
    """The ApiError of a fault of the server, without its traceback."""
    return ApiError("the server failed at this request; its log says why", status=500)
