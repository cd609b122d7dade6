#!/usr/bin/env bash
# The official image has no variables for these settings; its own entrypoint does the rest.
set -euo pipefail
logs="/logs/$HOSTNAME"

set_option() {
  sed -i -E "/^(# ?)?$1:/d" "$CASSANDRA_CONF/cassandra.yaml"
  echo "$1: $2" >> "$CASSANDRA_CONF/cassandra.yaml"
}

set_option cdc_enabled true
set_option cdc_block_writes false
set_option storage_compatibility_mode NONE
# Where the Spark drivers see them, too: stage reads the segments in cdc_raw, and removes them.
set_option commitlog_directory "$logs/commitlog"
set_option cdc_raw_directory "$logs/cdc_raw"
install -d -o cassandra "$logs" "$logs/commitlog"
install -d -o cassandra -g "$RINGSYNC_GROUP" -m 2775 "$logs/cdc_raw"
exec docker-entrypoint.sh "$@"
