"""Secret AES keys from where Cassandra's operators keep them: Java keystores (JCEKS, PKCS12) and plain key files."""
