#!/usr/bin/env bash
# Once per start, before Airflow: database, pool, login. Running it again changes nothing.
set -euo pipefail

airflow db migrate
airflow pools import /opt/ringsync/docker/pools.json

umask 077
python -c 'import json, os; print(json.dumps({"admin": os.environ["RINGSYNC_AIRFLOW_PASSWORD"]}))' \
  > "$AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"
