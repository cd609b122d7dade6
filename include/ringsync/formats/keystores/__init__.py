"""Readers of secret AES keys in Java keystores (JCEKS, PKCS12) and plain key files."""
