#!/bin/bash
# What a machine of a spile fleet runs at boot, and the one-line bootstrap of a bare one:
#
#   bash startup.sh --home gs://bucket/fleet/NAME --node tpu-us-central1-a-0 [--zone Z] [--host N] [--force] [--install-only]
#
# Finds or installs a Python that is new enough, installs the fleet's own wheel, checks that JAX sees the chips, and
# runs the agent under systemd, so that the worker resumes by itself after every boot. Without flags it takes them from
# the machine's metadata. --force installs anew.
set -Eeuo pipefail
umask 077  # fleet.json may hold secrets, and logs may quote them

meta() { curl -fsS -m 10 -H 'Metadata-Flavor: Google' "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/$1"; }
# The same for what a machine may not have: nothing then, and an error only where nobody answers. A machine with chips asks
# for a minute or so: a slice's host that took silence for a no would take itself for the first, and so would the others.
tries=1
for each in "${SPILE_DEVICES:-/dev}"/accel[0-9]* "${SPILE_DEVICES:-/dev}"/vfio/[0-9]*; do [ ! -e "$each" ] || tries="${SPILE_TRIES:-10}"; done
ask() {
  local try said
  for ((try = 1; ; try++)); do
    said="$(curl -sS -m 10 -w '\n%{http_code}' -H 'Metadata-Flavor: Google' \
      "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/$1")" || true
    case "${said##*$'\n'}" in
      200) printf '%s' "${said%$'\n'*}"; return 0 ;;
      404) return 0 ;;
    esac
    [ "$try" -lt "$tries" ] || return 1
    sleep "$((try < 5 ? try : 5))"
  done
}
home='' node='' zone='' host='' force='' install_only=''
while [ $# -gt 0 ]; do
  case "$1" in
    --home) home="$2"; shift ;;
    --node) node="$2"; shift ;;
    --zone) zone="$2"; shift ;;
    --host) host="$2"; shift ;;
    --force) force=1 ;;
    --install-only) install_only=1 ;;
    *) echo "startup.sh: unknown flag $1: expected --home, --node, --zone, --host or --force" >&2; exit 2 ;;
  esac
  shift
done
home="${home:-$(ask instance/attributes/spile-home || true)}"
node="${node:-$(ask instance/attributes/spile-node || true)}"
if [ -z "$home" ] || [ -z "$node" ]; then
  echo "startup.sh: no assignment: expected the metadata spile-home and spile-node, or --home and --node" >&2
  exit 2
fi
if [ -z "$host" ] && ! host="$(ask instance/attributes/agent-worker-number)" && [ "$tries" != 1 ]; then
  echo "startup.sh: the metadata server does not say which host of its slice this is: expected agent-worker-number, found no answer; boot again, or give --host" >&2
  exit 1
fi
host="${host:-0}"
zone="${zone:-$(ask instance/zone 2>/dev/null | sed 's|.*/||' || true)}"
place="${SPILE_HOME:-/opt/spile}"
units="${SPILE_UNIT_DIR:-/etc/systemd/system}"
mkdir -p "$place" "$units"
log="$place/startup.log"
exec > >(tee -a "$log") 2>&1
echo "spile: $node, host $host, in ${zone:-an unknown zone}; assignment in $home"

# -- the bucket, before there is a Python of ours: plain requests with the machine's own token --------------------------
storage="${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}"
token() { [ -n "${STORAGE_EMULATOR_HOST:-}" ] && echo none || meta instance/service-accounts/default/token | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/'; }
# A header through a pipe: a command line is everybody's to read.
bearer() { printf 'header = "Authorization: Bearer %s"\n' "$(token)"; }
escaped() { printf '%s' "$1" | sed 's|%|%25|g; s|/|%2F|g; s|+|%2B|g; s| |%20|g'; }
fetch() { # URL FILE
  case "$1" in
    gs://*) local rest="${1#gs://}"
      curl -fsS --retry 5 --retry-all-errors -K <(bearer) -o "$2" \
        "$storage/storage/v1/b/${rest%%/*}/o/$(escaped "${rest#*/}")?alt=media" ;;
    s3://*) aws s3 cp --only-show-errors "$1" "$2" ;;
    *) cp "${1#file://}" "$2" ;;
  esac
}
report() { # PHASE VERDICT [FILE WITH THE LOG]
  local body name="$node"
  [ "$host" = 0 ] || name="$node-h$host"
  body="$(python3 - "$name" "$1" "$2" "${3:-}" "$place/fleet.json" <<'PYTHON'
import json, sys, time
name, phase, verdict, log, fleet = sys.argv[1:]
try:
    known = json.load(open(fleet))
    deployment, hidden = known["deployment"], list((known.get("environment") or {}).values())
except (OSError, ValueError, KeyError):
    deployment, hidden = "", []
tail = open(log, errors="replace").read()[-4000:] if log else ""
for value in hidden:
    tail = tail.replace(value, "***") if len(value) >= 6 else tail
print(json.dumps({"node": name, "deployment": deployment, "phase": phase, "verdict": verdict, "updated": time.time(), "error": tail}))
PYTHON
)"
  case "$home" in
    gs://*) local rest="${home#gs://}"
      curl -fsS --retry 3 -o /dev/null -X POST -K <(bearer) -H 'Content-Type: application/json' \
        --data-binary @<(printf '%s' "$body") "$storage/upload/storage/v1/b/${rest%%/*}/o?uploadType=media&name=$(escaped "${rest#*/}/workers/$name.json")" ;;
    s3://*) printf '%s' "$body" | aws s3 cp --only-show-errors - "$home/workers/$name.json" ;;
    *) mkdir -p "$home/workers" && printf '%s' "$body" > "$home/workers/$name.json.tmp" && mv "$home/workers/$name.json.tmp" "$home/workers/$name.json" ;;
  esac
}
# The pause lets tee write what the report quotes.
fail() { trap - ERR; echo "spile: the start failed: $1"; sleep 1; report failed crashed "$log" || true; exit 1; }
trap 'fail "line $LINENO"' ERR

fetch "$home/fleet.json" "$place/fleet.json" || fail "cannot read $home/fleet.json"
fetch "$home/startup.sh" "$place/startup.new" && mv "$place/startup.new" "$place/startup.sh"
report booting ''
wheel="$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("wheel") or "")' "$place/fleet.json")"

# -- a Python that is new enough, and the wheel in it -------------------------------------------------------------------
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
install() {
  local found='' each
  rm -rf "$place/venv"
  for each in python3.13 python3.12 python3.11 python3; do
    if command -v "$each" > /dev/null && new_enough "$each" && "$each" -c 'import ensurepip, venv' 2>/dev/null; then found="$each"; break; fi
  done
  fetch "$home/$wheel" "$place/$wheel"
  if [ -n "$found" ] && ! command -v uv > /dev/null; then
    "$found" -m venv "$place/venv"
    "$place/venv/bin/pip" install --quiet "$place/$wheel${SPILE_EXTRAS-[tpu]}"
  else
    export PATH="$HOME/.local/bin:$PATH"
    command -v uv > /dev/null || python3 -m pip install --quiet --user uv
    uv venv --quiet --python 3.12 "$place/venv"
    uv pip install --quiet --python "$place/venv/bin/python" "spile${SPILE_EXTRAS-[tpu]} @ file://$place/$wheel"
  fi
  echo "$wheel" > "$place/installed"
}
export HOME="${HOME:-/root}"
python="${SPILE_PYTHON:-$place/venv/bin/python}"
fresh=''
if [ -z "${SPILE_PYTHON:-}" ]; then
  if [ -n "$force" ] || [ ! -x "$python" ] || [ "$(cat "$place/installed" 2>/dev/null)" != "$wheel" ]; then
    report installing ''
    install
    fresh=1
  fi
fi
new_enough "$python" || fail "expected Python 3.11 or newer, found $("$python" --version 2>&1)"

# -- the chips ----------------------------------------------------------------------------------------------------------
if [ "${SPILE_EXPECT:-tpu}" != any ] && { [ -n "$fresh" ] || [ -n "$force" ] || [ ! -f "$place/checked" ]; }; then
  # On a slice of many hosts JAX waits for all of them, and some may come later: there the devices' files have to do.
  hosts="$(meta instance/attributes/worker-network-endpoints 2>/dev/null | tr ',' '\n' | wc -l || echo 1)"
  "$python" - "$hosts" <<'PYTHON' || fail "JAX sees no TPU"
import glob, sys
chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
if chips and int(sys.argv[1]) > 1:
    print("spile: this host has", len(chips), "chips")
    sys.exit(0)
import jax
devices = jax.devices()
print("spile: JAX", jax.__version__, "sees", len(devices), devices[0].platform, "devices")
sys.exit(devices[0].platform != "tpu")
PYTHON
  touch "$place/checked"
fi

# -- the service --------------------------------------------------------------------------------------------------------
[ -z "$install_only" ] || exit 0
secret="$(ask instance/attributes/spile-secret || true)"
printf 'SPILE_POD_SECRET=%s\n' "${secret//[^A-Za-z0-9_-]/}" > "$place/secret.env"
cat > "$place/launch.sh" <<LAUNCH
#!/bin/bash
# Runs the agent; when there is a new deployment, starts over with that one's wheel.
cd "$place"
set -a; . "$place/secret.env"; set +a  # what the hosts of this slice share, where its metadata has it
while true; do
  "$python" -m spile.fleet.agent --home "$home" --node "$node" --zone "$zone" --host "$host" ${SPILE_AGENT_FLAGS:-}
  code=\$?
  [ \$code = 75 ] || exit \$code
  /bin/bash "$place/startup.sh" --home "$home" --node "$node" --zone "$zone" --host "$host" --install-only || exit 1
done
LAUNCH
cat > "$units/spile-worker.service" <<UNIT
[Unit]
Description=spile worker
Wants=network-online.target
After=network-online.target

[Service]
WorkingDirectory=$place
Environment="HOME=$HOME"
ExecStart=/bin/bash $place/launch.sh
Restart=on-failure
RestartSec=30
TimeoutStopSec=25

[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable spile-worker.service
if [ -n "$fresh$force" ]; then systemctl restart spile-worker.service; else systemctl start spile-worker.service; fi
echo "spile: the worker runs; its log: journalctl -u spile-worker"
