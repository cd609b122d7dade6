"""What can be wrong with a keystore."""


class KeystoreError(ValueError):
    """A keystore or key cannot be read; the message says why and what to do, and never holds a password or key."""
