"""What a user, a client or a file can cause, with the HTTP status and the OpenAI error type it becomes."""


class ServingError(Exception):
    """Base of every error that is answered to a client with its own text.

    Attributes:
      message: what was given, what was expected and what to do.
      status: HTTP status code.
      type: error type in the shape of OpenAI's error object.
      param: name of the request field at fault, None if there is no single one.
      code: error code in the shape of OpenAI's error object; the status unless a better one is given.
    """

    def __init__(
        self, message: str, *, status: int, type: str, param: str | None = None, code: int | str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = status if code is None else code


class InvalidRequestError(ServingError, ValueError):
    """400: a field of a request has a wrong type or value, or asks for more than this server has."""

    def __init__(self, message: str, *, param: str | None = None, code: int | str | None = None) -> None:
        super().__init__(message, status=400, type="invalid_request_error", param=param, code=code)


class UnauthorizedError(ServingError):
    """401: the API key is missing or wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, type="authentication_error", code="invalid_api_key")


class UnknownModelError(ServingError):
    """404: no model, adapter, mix or gated set has this name."""

    def __init__(self, message: str, *, param: str | None = "model") -> None:
        super().__init__(message, status=404, type="NotFoundError", param=param)


class OverloadedError(ServingError):
    """429: the server has as many requests as it takes; try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429, type="rate_limit_error")


class EngineError(ServingError):
    """500: a step failed and took the request with it; the request itself was valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, type="internal_server_error")


class UnavailableError(ServingError):
    """503: the server is ending or its engine has stopped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, type="service_unavailable")
