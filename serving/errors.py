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


class ForbiddenError(ServingError):
    """403: this client, or any client, may not do this; the message says what the server's owner can change."""

    def __init__(self, message: str, *, param: str | None = None, code: int | str | None = None) -> None:
        super().__init__(message, status=403, type="permission_error", param=param, code=code)


class UnknownModelError(ServingError):
    """404: no model, adapter, mix or gated set has this name, or no folder this path."""

    def __init__(self, message: str, *, param: str | None = "model", code: int | str | None = None) -> None:
        super().__init__(message, status=404, type="NotFoundError", param=param, code=code)


class ConflictError(ServingError):
    """409: what is asked for does not go with what the server holds now."""

    def __init__(self, message: str, *, param: str | None = None, code: int | str | None = None) -> None:
        super().__init__(message, status=409, type="conflict_error", param=param, code=code)


class OverloadedError(ServingError):
    """429: the server has as many requests, or loads, as it takes; try again later.

    Attributes:
      retry_after_s: when there may be room, in whole seconds, at least 1.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1, code: int | str | None = None) -> None:
        super().__init__(message, status=429, type="rate_limit_error", code=code)
        self.retry_after_s = max(1, retry_after_s)


class EngineError(ServingError):
    """500: a step failed and took the request with it; the request itself was valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, type="internal_server_error")


class UnavailableError(ServingError):
    """503: the server is ending or its engine has stopped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, type="service_unavailable")
