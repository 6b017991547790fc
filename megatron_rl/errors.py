"""The base class of errors that the user can correct."""


class UserError(ValueError):
    """A mistake in settings, files or the environment; the message names value, rule and cure.

    Commands print the message alone. Every other error is a defect of this package or of a library
    and is reported with its traceback.
    """
