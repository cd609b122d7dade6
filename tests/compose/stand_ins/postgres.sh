#!/bin/bash
# The part of the original's entrypoint that ringsync uses: user, password and database are made at the first start.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
  chown postgres "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --init-groups "$BASH_SOURCE" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --auth-host=scram-sha-256 --auth-local=trust
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  pg_ctl -o "-c listen_addresses=''" -w start
  createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl -m fast -w stop
fi
exec "$@" -c listen_addresses='*'
