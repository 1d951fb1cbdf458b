"""Errors that a user can mend. The message says what is wrong and what to do; the shell prints it as one paragraph."""


class UserError(ValueError):
    """Input, a setting or a file is not usable as given; the message names it and the remedy."""


class NoEffect(UserError):
    """A change was applied that alters nothing on this model."""


class SlotConflict(UserError):
    """Two changes of one arm want to fill the same slot."""
