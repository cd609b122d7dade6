#!/usr/bin/env bash
# The official image has no variables for these settings; its own entrypoint does the rest.
set -euo pipefail
sed -i \
  -e 's/^cdc_enabled: .*/cdc_enabled: true/' \
  -e 's/^storage_compatibility_mode: .*/storage_compatibility_mode: NONE/' \
  /etc/cassandra/cassandra.yaml
grep -q '^cdc_enabled: true$' /etc/cassandra/cassandra.yaml || echo 'cdc_enabled: true' >> /etc/cassandra/cassandra.yaml
exec docker-entrypoint.sh "$@"
