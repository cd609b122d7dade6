"""Exit 0 if a component of Airflow is healthy, by the API server's own account: `healthy.py scheduler`."""

import json
import sys
from urllib.request import urlopen

with urlopen("http://airflow-api:8080/api/v2/monitor/health", timeout=5) as answer:
    health = json.load(answer)
sys.exit(health[sys.argv[1]]["status"] != "healthy")
