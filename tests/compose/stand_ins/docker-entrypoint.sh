#!/bin/bash
# Become the user cassandra, write the variables of docker-compose.yaml into the configuration, and start.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
  chown -R cassandra "$CASSANDRA_CONF" /var/lib/cassandra /var/log/cassandra
  exec setpriv --reuid=cassandra --regid=cassandra --init-groups "$0" "$@"
fi

put() {
  sed -i -E "s|^(# )?$1:.*|$1: $2|" "$CASSANDRA_CONF/cassandra.yaml"
}

own="$(hostname --ip-address | cut -d' ' -f1)"
put listen_address "$own"
put broadcast_address "$own"
put rpc_address 0.0.0.0
put broadcast_rpc_address "$own"
put cluster_name "$CASSANDRA_CLUSTER_NAME"
put num_tokens "$CASSANDRA_NUM_TOKENS"
put endpoint_snitch "$CASSANDRA_ENDPOINT_SNITCH"
sed -i "s|- seeds:.*|- seeds: \"$CASSANDRA_SEEDS\"|" "$CASSANDRA_CONF/cassandra.yaml"
printf 'dc=%s\nrack=%s\n' "$CASSANDRA_DC" "$CASSANDRA_RACK" > "$CASSANDRA_CONF/cassandra-rackdc.properties"
exec "$@"
