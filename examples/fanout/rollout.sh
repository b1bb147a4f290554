#!/bin/sh
# Roll out an update in waves: each file of VINs is one wave, and a wave with too few acknowledgements stops the roll-out.
#
#   examples/fanout/rollout.sh task_ota_7 update.json pilot.txt germany.txt world.txt
#
# Environment: MIN_PERCENT  acknowledged deliveries that a wave needs before the next one starts (default 95)
#              EXPIRES      time that each wave may take (default 2h)
#              POLL         seconds between two looks at a wave (default 5)
#              MQTT_HOST, MQTT_PORT, MOTORCADE_HTTP  where the node is
#
# Run it again after an interruption: a wave that was sent before is not sent twice.
set -eu

figure() { # REQUEST EXPRESSION: a figure of `motorcade fanout status REQUEST --json`, which is `r`
    motorcade fanout status "$1" --json | python3 -c "import json, sys; r = json.load(sys.stdin); print($2)"
}

request=$1 payload=$2
shift 2
wave=0
for vins in "$@"; do
    wave=$((wave + 1))
    name="${request}_wave${wave}"
    motorcade fanout send --host "${MQTT_HOST:-127.0.0.1}" --port "${MQTT_PORT:-1883}" \
        --vins "$vins" --request "$name" --payload "$payload" --expires "${EXPIRES:-2h}"

    # Wait until every delivery is acknowledged, failed or expired.
    until [ "$(figure "$name" 'r["pending"]')" = 0 ]; do
        sleep "${POLL:-5}"
        motorcade fanout gc > /dev/null # count what has expired now, not with the next hourly collection
    done

    percent=$(figure "$name" '100 * r["states"].get("acked", 0) // max(r["targets"], 1)')
    echo "$name: $percent % acknowledged"
    if [ "$percent" -lt "${MIN_PERCENT:-95}" ]; then
        echo "$name: fewer than ${MIN_PERCENT:-95} %, the roll-out stops here" >&2
        motorcade fanout status "$name" >&2
        exit 1
    fi
done
